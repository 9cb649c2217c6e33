"""A gold answer that is a number is answered by a number, not by the sum that the question asks for."""

import pytest

from tuneloop.rewards.numeric import score


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        ("68", "23 + 45"),
        ("68", "The answer is 23 + 45."),
        ("68", r"\boxed{23+45}"),
        ("68", r"$23 + 45$"),
        ("68", r"\boxed{68 = 23 + 45}"),
        ("3", r"\boxed{\frac{6}{2}}"),
        ("3", r"\boxed{6/2}"),
        ("3", r"\boxed{\sqrt{9}}"),
        ("25", r"\boxed{5^2}"),
        ("-4", r"\boxed{3 - 7}"),
        ("120", r"\boxed{5 \cdot 24}"),
        ("12", r"\boxed{\binom{12}{1}}"),
        ("0.5", r"\boxed{1 - 0.5}"),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{4} + \frac{1}{4}}"),
        (r"\frac{3}{2}", r"\boxed{3 \cdot 2^{-1}}"),
        ("1,234", r"\boxed{1000 + 234}"),
        ("50\\%", r"\boxed{25 + 25}"),
    ],
)
def test_what_is_not_worked_out_earns_nothing(gold: str, completion: str) -> None:
    assert score(completion, gold, {}) == 0.0


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        ("68", "23 + 45 = 68"),
        ("68", r"\boxed{23 + 45 = 68}"),
        ("68", r"\boxed{68.0}"),
        ("68", r"\boxed{+68}"),
        ("68", r"\boxed{(68)}"),
        ("68", r"\boxed{6.8 \times 10^1}"),
        ("68", r"\boxed{68 \text{ cm}}"),
        ("1234", r"\boxed{1{,}234}"),
        ("1.5", r"\boxed{\frac32}"),
        ("1.5", r"\boxed{1\frac{1}{2}}"),
        ("1.5", "3/2"),
        (r"\frac{1}{2}", r"\boxed{0.5}"),
        (r"\frac{1}{2}", r"\boxed{50\%}"),
        (r"-\frac{2}{3}", r"\boxed{\frac{-2}{3}}"),
        ("4^{10}", r"\boxed{1048576}"),
        (r"3\sqrt{13}", r"\boxed{\sqrt{117}}"),
    ],
)
def test_numbers_in_any_form_of_a_number_are_right(gold: str, completion: str) -> None:
    assert score(completion, gold, {}) == 1.0
