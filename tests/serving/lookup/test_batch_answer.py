"""What several batches of one group of requests come to, where hosts are lost."""

import numpy as np

from serving.errors import HostUnavailable
from serving.lookup.batch_answer import BatchAnswer, LostHost, failed_of, zeroed_of

NOTHING = np.zeros((0, 0), np.float32)
ONE, TWO = HostUnavailable("host 1 (m-host-1): no answer"), HostUnavailable("host 2 (m-host-2): no answer")


def tables(*names: str) -> frozenset[str]:
    return frozenset(names)


def test_an_error_names_the_tables_of_all_batches_by_host() -> None:
    pooled = BatchAnswer(NOTHING, {0: [LostHost(ONE, tables("word", "item"))], 1: [LostHost(ONE, tables("word"))]})
    rows = BatchAnswer(
        NOTHING, {0: [LostHost(HostUnavailable(str(ONE)), tables("hist")), LostHost(TWO, tables("item"))]}
    )
    failures = failed_of([pooled, BatchAnswer(NOTHING), rows])
    assert {position: str(error) for position, error in failures.items()} == {
        0: "tables 'hist', 'item', 'word': host 1 (m-host-1): no answer; tables 'item': host 2 (m-host-2): no answer",
        1: "tables 'word': host 1 (m-host-1): no answer",
    }
    assert {type(error) for error in failures.values()} == {HostUnavailable}


def test_an_error_names_the_first_few_tables_and_hosts() -> None:
    many = tables(*(f"table_{number:03}" for number in range(300)))
    losses = [LostHost(HostUnavailable(f"host {number} (m-host-{number}): no answer"), many) for number in range(20)]
    said = str(failed_of([BatchAnswer(NOTHING, {0: losses})])[0])
    first = "tables 'table_000', 'table_001', 'table_002' and 297 more: host"
    assert said == "; ".join(
        [*(f"{first} {number} (m-host-{number}): no answer" for number in range(3)), "and 17 more hosts"]
    )


def test_an_error_with_long_table_names_fits_on_a_screen() -> None:
    loss = LostHost(HostUnavailable("host 1: " + "y" * 900), tables("x" * 5000, "\x1b[2J" * 100, "z"))
    said = str(failed_of([BatchAnswer(NOTHING, {0: [loss] * 9})])[0])
    assert len(said) <= 1000
    assert said.isprintable()


def test_a_request_with_zeros_in_two_batches_counts_once() -> None:
    pooled = BatchAnswer(
        NOTHING, {2: [LostHost(ONE, tables("word"))]}, {0: tables("item"), 1: tables("item"), 2: tables("item")}
    )
    rows = BatchAnswer(NOTHING, {}, {0: tables("item", "hist"), 2: tables("hist")})
    assert zeroed_of([pooled, rows]) == {"item": 2, "hist": 1}
