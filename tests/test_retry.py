"""Retry policies: exact schedules, spread, budgets, and that no policy can do harm."""

import logging
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, strategies as st

from django_dbtaskqueue.core import retry
from django_dbtaskqueue.core.outcomes import Fail
from django_dbtaskqueue.core.retry import Arithmetic, Fixed, Geometric, Linear, PerException, Policy, Sequence, Staged
from tests.support import Unprintable


def s(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def schedule(policy: Any, attempts: int = 6) -> list[float | None]:
    delays = [policy(attempt, None) for attempt in range(1, attempts + 1)]
    return [None if delay is None else delay.total_seconds() for delay in delays]


def test_exact_schedules() -> None:
    for policy, seconds in [
        (Fixed(s(10), jitter=0), [10, 10, 10, 10, 10, 10]),
        (Arithmetic(s(10), jitter=0), [10, 30, 50, 70, 90, 110]),
        (Arithmetic(s(10), s(5), jitter=0), [10, 15, 20, 25, 30, 35]),
        (Geometric(s(10), jitter=0), [10, 20, 40, 80, 160, 320]),
        (Geometric(s(10), 3, s(100), jitter=0), [10, 30, 90, 100, 100, 100]),
        (Sequence(s(0), s(10), s(60), jitter=0), [0, 10, 60, 60, 60, 60]),
        (Staged((2, s(10)), (3, s(60)), (None, s(300)), jitter=0), [10, 10, 60, 300, 300, 300]),
        (Staged((2, s(0)), (4, s(60)), jitter=0), [0, 0, 60, 60, None, None]),
    ]:
        assert schedule(policy) == schedule(policy) == seconds
    assert [retry.DEFAULT.delay(attempt) for attempt in (1, 2, 9, 10, 100)] == [s(10), s(20), s(2560), s(3600), s(3600)]


@pytest.mark.parametrize(
    "policy",
    [Fixed(s(100)), Arithmetic(s(100)), Geometric(s(100)), Sequence(s(100)), Staged((None, s(100)))],
    ids=lambda policy: type(policy).__name__,
)
def test_jitter_is_on_and_spreads_a_thousand_retries_over_half_the_delay(policy: Policy) -> None:
    delays = [policy(1, None) for _ in range(1000)]
    seconds = [delay.total_seconds() for delay in delays if delay is not None]
    assert len(seconds) == 1000 and max(seconds) - min(seconds) >= 50
    assert 70 <= min(seconds) < max(seconds) <= 130


def test_jitter_comes_after_the_maximum() -> None:
    policy = Geometric(s(100), maximum=s(10), jitter=1)
    seconds = [delay.total_seconds() for _ in range(500) if (delay := policy(9)) is not None]
    assert 10 < max(seconds) <= 20 and min(seconds) >= 0


DELAYS = st.timedeltas(timedelta(0), timedelta(days=365))
JITTERS = st.floats(0, 1) | st.just(0.3)
RATIOS = st.floats(0, exclude_min=True, allow_infinity=False)


@st.composite
def stages(draw: st.DrawFn) -> list[tuple[int | None, timedelta]]:
    bounds: list[int | None] = sorted(draw(st.sets(st.integers(1, 100), min_size=1, max_size=4)))
    if draw(st.booleans()):
        bounds[-1] = None
    return [(bound, draw(DELAYS)) for bound in bounds]


POLICIES: st.SearchStrategy[Any] = st.one_of(
    st.builds(Fixed, DELAYS, jitter=JITTERS),
    st.builds(Arithmetic, DELAYS, st.none() | DELAYS, jitter=JITTERS),
    st.builds(Geometric, DELAYS, RATIOS, st.none() | DELAYS, jitter=JITTERS),
    st.builds(lambda plan, jitter: Sequence(*plan, jitter=jitter), st.lists(DELAYS, min_size=1, max_size=5), JITTERS),
    st.builds(lambda plan, jitter: Staged(*plan, jitter=jitter), stages(), JITTERS),
)


@given(POLICIES, st.integers(1, 20) | st.integers(-(10**30), 10**30))
def test_no_policy_ever_raises_or_leaves_its_bounds(policy: Any, attempt: int) -> None:
    delay = policy(attempt, ValueError("x"))
    assert delay is None or timedelta(0) <= delay <= timedelta(days=365)
    assert isinstance(policy, Staged) or delay is not None


@given(POLICIES)
def test_text_describes_a_policy_exactly(policy: Any) -> None:
    assert retry.parse_policy(retry.policy_text(policy)) == policy


def test_a_wrong_policy_is_refused_when_made() -> None:
    for make, error, words in [
        (lambda: Fixed(10), TypeError, r"Fixed: interval must be a timedelta, not 10. Write timedelta"),
        (lambda: Fixed(s(-1)), ValueError, r"interval must be between 0 and 365 days, not -1 day, 23:59:59"),
        (lambda: Fixed(timedelta(days=366)), ValueError, r"between 0 and 365 days"),
        (lambda: Fixed(s(1), jitter=2), ValueError, r"Fixed: jitter must be between 0 \(exact\) and 1, not 2"),
        (lambda: Arithmetic(s(1), 5), TypeError, r"Arithmetic: step must be a timedelta, not 5"),
        (lambda: Geometric(s(1), 0), ValueError, r"Geometric: ratio must be a number above 0, not 0"),
        (lambda: Geometric(s(1), float("nan")), ValueError, r"ratio must be"),
        (lambda: Geometric(s(1), maximum=3600), TypeError, r"Geometric: maximum must be a timedelta, not 3600"),
        (lambda: Sequence(), ValueError, r"Sequence: give at least one delay"),
        (lambda: Sequence(s(1), 2), TypeError, r"Sequence: delay 2 must be a timedelta, not 2"),
        (lambda: Staged(), ValueError, r"Staged: give at least one stage"),
        (lambda: Staged((3, s(1)), (3, s(2))), ValueError, r"stage 2 must end after attempt 3, not 3"),
        (lambda: Staged((None, s(1)), (3, s(2))), ValueError, r"stage 1 must end after attempt 0, not None"),
    ]:
        with pytest.raises(error, match=words):
            make()


def test_parse() -> None:
    for text, policy in [
        ("linear:10s", Linear(s(10))),
        (" Fixed : 1m30s , jitter = 0 ", Fixed(s(90), jitter=0)),
        ("arithmetic:10s,step=500ms", Arithmetic(s(10), s(0.5))),
        ("geometric:10s,x2,max=1h", Geometric(s(10), 2, s(3600))),
        ("geometric:10s,max=1h,x1.5,jitter=0.1", Geometric(s(10), 1.5, s(3600), jitter=0.1)),
        ("staged:3=10s,5=1m,rest=5m", Staged((3, s(10)), (5, s(60)), (None, s(300)))),
        ("sequence:PT0S,PT1M30S,00:02:00", Sequence(s(0), s(90), s(120))),
    ]:
        assert retry.parse_policy(text) == policy


def test_describe() -> None:
    for policy, text in [
        (Fixed(s(90)), "fixed:1m30s"),
        (Arithmetic(s(10), s(5)), "arithmetic:10s,step=5s"),
        (Geometric(s(10), maximum=s(3600)), "geometric:10s,x2,max=1h"),
        (Sequence(s(0), s(0.25), jitter=0), "sequence:0s,250ms,jitter=0"),
        (Staged((3, s(10)), (None, s(60))), "staged:3=10s,rest=1m"),
        (PerException({TimeoutError: Fixed(s(1)), KeyError: None}), "TimeoutError -> fixed:1s; KeyError -> never"),
        (raising, f"{__name__}.raising"),
    ]:
        assert retry.policy_text(policy) == text


def test_parse_teaches() -> None:
    for text, words in [
        ("", "'' is not a retry policy. The forms are: fixed:10s | arithmetic:"),
        ("10s", "'10s' is not a retry policy."),
        ("fixd:10s", "is not a retry policy. Did you mean 'fixed'?"),
        ("fixed", "'' is not a duration. Write numbers with a unit"),
        ("fixed:10 parsecs", "'10parsecs' is not a duration"),
        ("fixed:10s,20s", "positional argument"),
        ("fixed:366d", "between 0 and 365 days"),
        ("fixed:10s,jitter=9", "jitter must be between 0 (exact) and 1, not 9.0. The forms"),
        ("fixed:10s,max=1h", "unexpected keyword argument 'maximum'"),
        ("geometric:10s,x", "could not convert"),
        ("staged:10s", "invalid literal"),
        ("staged:rest=1s,3=2s", "stage 1 must end after attempt 0, not None"),
    ]:
        with pytest.raises(ValueError, match="The forms are") as caught:
            retry.parse_policy(text)
        assert words in str(caught.value) and repr(text) in str(caught.value)


@given(st.text("fixedgomtrcsa:0123456789.,=hdu -", max_size=30))
def test_parse_returns_a_policy_or_raises_value_error(text: str) -> None:
    try:
        policy = retry.parse_policy(f"geometric:{text}")
    except ValueError:
        return
    assert retry.parse_policy(retry.policy_text(policy)) == policy


class Late(TimeoutError):
    pass


def test_the_most_specific_exception_class_wins_and_without_one_the_default_decides() -> None:
    policy = {TimeoutError: Fixed(s(1), jitter=0), OSError: Fixed(s(2), jitter=0), KeyError: None}
    policy |= {LookupError: "fixed:3s,jitter=0", Exception: Fixed(s(4), jitter=0)}
    errors = [Late(), TimeoutError(), ConnectionError(), KeyError(), IndexError(), ValueError(), SystemExit(), None]
    for error, seconds in zip(errors, (1, 1, 2, None, 3, 4, 4, 4), strict=True):
        expected = None if seconds is None else s(seconds)
        assert retry.normalise(policy)(1, error) == retry.next_delay(policy, 1, error) == expected
    assert s(7) <= retry.normalise({KeyError: None})(1, ValueError()) <= s(13)
    assert retry.normalise({Exception: None})(1, ValueError()) is None


def test_normalise_passes_policies_and_functions_through_and_refuses_the_rest() -> None:
    for policy in (Fixed(s(1)), giving(None)):
        assert retry.normalise(policy) is policy
    assert retry.normalise(None) is retry.DEFAULT and retry.normalise("fixed:1s") == Fixed(s(1))
    for wrong in (10, s(10), [Fixed(s(1))], Fixed, object(), {"KeyError": None}, {int: None}):
        with pytest.raises(TypeError, match=r"not a retry policy|exception classes as keys"):
            retry.normalise(wrong)


class Failing(Unprintable):
    def __call__(self, attempt: int, error: BaseException | None) -> timedelta:
        raise KeyError("x")


def raising(attempt: int, error: BaseException | None) -> timedelta:
    raise RuntimeError("policy is broken")


def giving(value: Any) -> Policy:
    return lambda attempt, error: value


@pytest.mark.parametrize(
    "policy",
    [
        *(raising, giving(10), giving(True), giving(s(-1)), giving("10s"), giving(float("nan"))),
        *({Exception: giving(0)}, {"x": None}, "fixed:ten", 42, lambda: s(1)),
    ],
)
def test_a_faulty_policy_is_logged_and_the_default_decides(policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "django_dbtaskqueue"):
        delay = retry.next_delay(policy, 2, ValueError("x"))
    assert s(14) <= delay <= s(26)
    (record,) = caplog.records
    assert "the default policy decides" in record.getMessage() and record.exc_info


def test_even_a_policy_without_repr_cannot_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    # A handler that formats the record would report the broken repr by itself; here none is attached.
    monkeypatch.setattr(retry.logger, "propagate", False)
    monkeypatch.setattr(retry.logger, "handlers", [logging.NullHandler()])
    assert retry.next_delay(Failing(), 1, None) is not None
    assert retry.next_delay(giving(Unprintable()), 1, None) is not None


EXACT, FAILED = Fixed(s(7), jitter=0), Fail(ValueError())


def test_decide() -> None:
    any_other, later = {KeyError: None, Exception: EXACT}, Fail("no seat", delay=s(1))
    for fail, attempt, policy, expected in [
        *((FAILED, 1, EXACT, s(7)), (FAILED, 5, EXACT, None), (FAILED, 1, {ValueError: None}, None)),
        *((FAILED, 1, giving(None), None), (FAILED, 1, giving(s(0)), s(0)), (FAILED, 1, any_other, s(7))),
        (FAILED, 1, giving(timedelta.max), timedelta(days=365)),
        (Fail("no seat", delay=timedelta.max), 1, EXACT, timedelta(days=365)),
        *((Fail("no seat", delay=delay, retry=False), 1, EXACT, None) for delay in (None, s(1))),
        *((later, 1, EXACT, s(1)), (later, 1, giving(None), s(1)), (later, 5, EXACT, None)),
        (Fail("no seat"), 1, any_other, s(7)),
    ]:
        assert retry.retry_delay(fail, attempt=attempt, max_attempts=5, policy=policy) == expected


def test_the_policy_sees_attempt_and_error() -> None:
    seen, error = list[Any](), ValueError("x")
    for attempt, fail in ((3, Fail(error)), (4, Fail("text"))):
        retry.retry_delay(fail, attempt=attempt, max_attempts=5, policy=lambda *given: seen.append(given) or s(1))
    assert seen == [(3, error), (4, None)]
