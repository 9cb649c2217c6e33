"""What is inside an artifact: rows of rollouts, token ids, conversations, the canary.

Here belong columns, encodings, their readers and writers. How a value is computed belongs to the stage that does it."""
