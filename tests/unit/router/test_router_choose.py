"""Pure parts: the allow-list, the version floor, the view of the fleet, the local policy."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.core.store import Lease
from rollstream.router import routes
from rollstream.router.choose import Bindings, Floor, Wish, least_loaded, parse_floor
from rollstream.router.errors import HTTPError
from rollstream.router.view import Replica, View, next_view, parse_address


def lease(id: str, *, state: str = "ready", timeline: int = 0, version: int = 0, pid: int = 1, port: int = 80) -> Lease:
    return Lease(
        id=id,
        role="inference",
        address=f"http://127.0.0.1:{port}",
        state=state,
        timeline=timeline,
        version=version,
        pid=pid,
    )


def view(*leases: Lease, before: View | None = None) -> View:
    return next_view(before or View(), leases)


# --- routes ---


@pytest.mark.parametrize("path", sorted(routes.FORWARDED))
def test_listed_routes_are_forwarded_with_their_method_only(path: bytes) -> None:
    method = routes.FORWARDED[path][0]
    assert routes.check(method, path)
    with pytest.raises(HTTPError) as caught:
        routes.check(b"DELETE", path)
    assert caught.value.status == 405


@pytest.mark.parametrize(
    "path",
    [
        b"/pause",
        b"/resume",
        b"/update_weights",
        b"/collective_rpc",
        b"/v1/load_lora_adapter",
        b"/v1/unload_lora_adapter",
        b"/rollstream/load",
        b"/rollstream/status",
        b"/sleep",
        b"/reset_prefix_cache",
        b"/v1/chat/completions/",
        b"//v1/completions",
        b"/v1/../pause",
        b"/v1/models/../../pause",
        b"/v1/models/%2e%2e/%2e%2e/pause",
        b"/v1/models//pause",
        b"/V1/completions",
        b"/inference/v1/generate/../../pause",
        b"*",
        b"",
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_everything_else_is_unreachable(method: bytes, path: bytes) -> None:
    with pytest.raises(HTTPError) as caught:
        routes.check(method, path)
    assert caught.value.status == 404 or (caught.value.status == 405 and path.startswith(b"/v1/models/"))


def test_one_model_may_have_slashes_in_its_name() -> None:
    assert routes.check(b"GET", b"/v1/models/Qwen/Qwen3-0.6B")


def test_own_routes() -> None:
    assert not routes.check(b"GET", b"/health")
    assert not routes.check(b"POST", b"/finish_session")


# --- version floor ---


@pytest.mark.parametrize("value", [b"", b"a", b"-1", b"1:", b":1", b"1:2:3", b"1.5", b"9" * 19, b"1 2", "٣".encode()])
def test_a_bad_floor_is_refused(value: bytes) -> None:
    with pytest.raises(HTTPError) as caught:
        parse_floor(value)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("floor", "timeline", "version", "admitted"),
    [
        (b"3", 0, 3, True),
        (b"3", 0, 2, False),
        (b"3", 7, 3, True),
        (b"1:3", 1, 3, True),
        (b"1:3", 1, 2, False),
        (b"1:3", 0, 9, False),
        (b"1:3", 2, 0, True),
    ],
)
def test_floor(floor: bytes, timeline: int, version: int, admitted: bool) -> None:
    parsed = parse_floor(floor)
    assert parsed is not None
    (replica,) = view(lease("a", timeline=timeline, version=version)).ready.values()
    assert parsed.admits(replica) is admitted
    assert parse_floor(None) is None


# --- view ---


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:80", "https://a:1", "http://a", "http://:80", "http://a:99999", "http://[::1"]
)
def test_bad_addresses_are_no_replica(address: str) -> None:
    assert parse_address(address) is None


def test_addresses() -> None:
    assert parse_address("http://10.0.0.7:8100") == ("10.0.0.7", 8100)
    assert parse_address("http://[::1]:8100") == ("::1", 8100)


def test_only_ready_replicas_are_routable_and_the_rest_is_named() -> None:
    seen = view(lease("a"), lease("b", state="loading"), lease("c", state="draining"))
    assert set(seen.ready) == {"a"}
    wish = Wish(None, None)
    assert "No inference replica is registered" in wish.why_none(View())
    assert "b is loading" in wish.why_none(view(lease("b", state="loading")))
    assert "the newest is 0:2" in Wish(None, Floor(0, 3)).why_none(view(lease("a", version=2)))


def test_since_tells_a_replica_that_came_back_from_one_that_stayed() -> None:
    first = view(lease("a"), lease("b"))
    stayed = view(lease("a", version=5), lease("b", state="loading"), before=first)
    assert stayed.ready["a"].since == first.ready["a"].since
    back = view(lease("a", pid=2), lease("b"), before=stayed)
    assert back.ready["a"].since == back.generation, "another process"
    assert back.ready["b"].since == back.generation, "was away"
    moved = view(lease("a", pid=2, port=81), lease("b"), before=back)
    assert moved.ready["a"].since == moved.generation, "another address"


def test_a_failed_replica_is_tried_again_only_after_it_came_back() -> None:
    first = view(lease("a"), lease("b"))
    wish = Wish(None, None)
    wish.failed["a"] = first.generation
    assert [r.id for r in wish.candidates(first)] == ["b"]
    later = view(lease("a"), lease("b"), before=first)
    assert [r.id for r in wish.candidates(later)] == ["b"]
    restarted = view(lease("a", pid=2), lease("b"), before=later)
    assert [r.id for r in wish.candidates(restarted)] == ["a", "b"]
    wish.failed["b"] = first.generation
    assert "Every ready replica failed" in wish.why_none(first)


# --- local policy ---


def replicas(count: int) -> list[Replica]:
    return list(view(*(lease(f"r{n}") for n in range(count))).ready.values())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50)), min_size=1, max_size=8))
def test_least_loaded_takes_a_minimum(state: list[tuple[int, int]]) -> None:
    candidates = replicas(len(state))
    loads = {f"r{n}": load for n, (load, _) in enumerate(state)}
    turns = {f"r{n}": turn for n, (_, turn) in enumerate(state)}
    chosen = least_loaded(candidates, loads, turns)
    assert loads[chosen.id] == min(loads.values())
    assert turns[chosen.id] == min(turns[r] for r, load in loads.items() if load == loads[chosen.id])


def test_without_load_turns_go_round() -> None:
    candidates, turns, seen = replicas(3), {}, Counter()
    for turn in range(1, 31):
        chosen = least_loaded(candidates, {}, turns)
        turns[chosen.id] = turn
        seen[chosen.id] += 1
    assert set(seen.values()) == {10}


def test_bindings_are_bounded_and_keep_the_recent() -> None:
    bindings = Bindings(size=3)
    for n in range(3):
        bindings.bind(f"s{n}", "a")
    bindings.bind("s0", "b")
    bindings.bind("s3", "a")
    assert (bindings.get("s0"), bindings.get("s1"), len(bindings)) == ("b", None, 3)
    bindings.forget("s0")
    assert bindings.get("s0") is None
