"""A live page over the runs of a store, for people: read only, without a database, made of what runs committed."""
