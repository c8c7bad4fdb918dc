"""Versions on the host: digests, who fetches from whom, newest only, shards that are put together again."""

import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.types import PolicyWeights, UserError
from jaxrl_llm.weights import digest
from jaxrl_llm.weights.fan_out import FanOut
from jaxrl_llm.weights.publisher import Publisher
from jaxrl_llm.weights.snapshot import named, take_snapshot
from jaxrl_llm.weights.transfer import Borrower, Lender, Part, assembled


def tree(**changed):
    return {
        "a": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "s": np.float32(2)},
        "b": np.ones(3, ml_dtypes.bfloat16),
    } | changed


@pytest.mark.parametrize(
    "other",
    [
        tree(b=np.ones(3, np.float16)),
        tree(b=np.ones((3, 1), ml_dtypes.bfloat16)),
        tree(b=np.array([1, 1, 2], ml_dtypes.bfloat16)),
        {"c": tree()["b"], "a": tree()["a"]},
        {"a": tree()["a"]},
    ],
    ids=["dtype", "shape", "value", "name", "missing"],
)
def test_a_digest_tells_everything_apart_but_not_where_it_lies(other):
    assert digest(tree()) == digest(jax.tree.map(jnp.asarray, dict(reversed(tree().items()))))
    assert digest(tree()) == digest(jax.tree.map(lambda x: np.array(x, order="F"), tree()))
    assert digest(other) != digest(tree())


def test_a_snapshot_is_what_it_was_taken_of():
    snapshot = take_snapshot(7, named(tree()))
    assert (snapshot.version, snapshot.digest) == (7, digest(tree()))
    assert [leaf.path for leaf in snapshot.leaves] == ["a.s", "a.w", "b"]
    assert snapshot.nbytes == 4 + 24 + 6


@given(width=st.integers(1, 3), count=st.integers(1, 40), order=st.randoms())
def test_a_version_spreads_as_a_tree(width, count, order):
    """Rounds of equal length: everybody who can be served is; the trainer sends few, and a round more serves
    (1 + width) times as many."""
    fan_out, waiting, rounds, served = FanOut("root", width), [f"s{i}" for i in range(count)], 0, []
    order.shuffle(waiting)
    while waiting:
        under_way = []
        for receiver in list(waiting):
            if (source := fan_out.begin(1, receiver)) is not None:
                assert source == "root" or source in served
                under_way.append((receiver, source))
                waiting.remove(receiver)
        assert under_way
        assert len(under_way) == min(width * (1 + len(served)), len(under_way) + len(waiting))
        for receiver, source in under_way:
            fan_out.end(source)
            fan_out.ready(receiver, 1)
            served.append(receiver)
        rounds += 1
    assert (1 + width) ** (rounds - 1) <= 1 + count


def test_nobody_fetches_from_itself_from_the_gone_or_another_version():
    fan_out = FanOut("root", 1)
    fan_out.ready("a", 1)
    assert fan_out.begin(2, "b") == "root"  # a has another version
    assert fan_out.begin(2, "b") is None
    assert fan_out.begin(1, "a") is None  # itself
    assert fan_out.begin(1, "b", avoid={"a"}) is None
    assert fan_out.begin(1, "b") == "a"
    fan_out.end("a")
    fan_out.gone("a")
    assert fan_out.begin(1, "b") is None
    fan_out.end("root")
    assert fan_out.begin(1, "b") == "root"


def test_a_publisher_goes_from_the_one_at_work_to_the_newest():
    handed, begun, go_on = [], threading.Event(), threading.Event()

    def to_host(params):
        begun.set()
        assert go_on.wait(20)
        return named(params)

    publisher = Publisher(handed.append, pytest.fail, to_host=to_host)
    publisher.start()
    publisher.publish(PolicyWeights(1, tree()))
    assert begun.wait(20)
    for version in (2, 3, 4):
        publisher.publish(PolicyWeights(version, tree(b=np.full(3, version, np.float32))))
    go_on.set()
    done = threading.Event()
    threading.Thread(target=lambda: (publisher.publish(PolicyWeights(5, tree())), done.set())).start()
    assert done.wait(20)
    while not handed or handed[-1].version != 5:
        pass
    publisher.stop()
    versions = [snapshot.version for snapshot in handed]
    assert versions in ([1, 4, 5], [1, 5])
    assert handed[0].digest == handed[-1].digest == digest(tree())


def test_what_breaks_a_publisher_is_told():
    told = []
    publisher = Publisher(print, told.append, to_host=lambda params: 1 / 0)
    publisher.start()
    publisher.publish(PolicyWeights(1, tree()))
    publisher._thread.join(20)
    assert isinstance(told[0], ZeroDivisionError)


def test_shards_travel_from_device_to_device_whatever_the_layouts(cpu_devices):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=cpu_devices)
    array = np.arange(48, dtype=np.float32).reshape(8, 6)
    leaves = {
        "both": jax.device_put(array, NamedSharding(mesh, P("x", "y"))),
        "rows": jax.device_put(array.astype(ml_dtypes.bfloat16), NamedSharding(mesh, P("x"))),
        "everywhere": jax.device_put(array.astype(np.int8), NamedSharding(mesh, P())),
        "number": jax.device_put(np.float32(3), cpu_devices[5]),
    }
    lender, borrower = Lender("127.0.0.1"), Borrower("127.0.0.1", cpu_devices[6:])
    loan = lender.lend(leaves)
    assert [part.path for part in loan.parts] == ["both"] * 8 + ["rows"] * 4 + ["everywhere", "number"]
    pulled = borrower.pull(lender.address, loan, timeout_s=20)
    assert {array.device for parts in pulled.values() for _, array in parts} == set(cpu_devices[6:])
    for path, leaf in leaves.items():
        whole = assembled(leaf.shape, pulled[path])
        assert whole.dtype == leaf.dtype
        np.testing.assert_array_equal(whole, np.asarray(leaf))
    with pytest.raises(UserError, match=r"the parts of the leaf both do not make up its shape \(8, 6\)"):
        assembled((8, 6), pulled["both"][1:])


def test_an_id_that_was_never_lent_is_given_up(cpu_devices):
    lender, borrower = Lender("127.0.0.1"), Borrower("127.0.0.1", cpu_devices[:1])
    leaves = {"w": jax.device_put(np.ones(3, np.float32), cpu_devices[1])}
    loan = lender.lend(leaves)
    other = type(loan)(loan.id + 1, (Part("w", (3,), "float32", (0,)),))
    with pytest.raises(UserError, match=r"sent nothing for 0\.3 s"):
        borrower.pull(lender.address, other, timeout_s=0.3)
    assert borrower.hangs
    lender._server.await_pull(other.id, list(leaves.values()))  # or its thread would outlive the test
    while borrower.hangs:
        time.sleep(0.01)
    for _ in range(2):
        lender.failed()
    with pytest.raises(UserError, match=r"2 pulls from .* have failed"):
        lender.lend(leaves)


def test_a_host_that_is_not_here_or_is_no_address_lends_nothing():
    with pytest.raises(UserError, match=r"0\.0\.0\.0 names no one address of this machine"):
        Lender("0.0.0.0")
    with pytest.raises(UserError, match="no transfer server on no-such-host"):
        Lender("no-such-host.invalid")
