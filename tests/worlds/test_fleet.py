"""Trainer and samplers over real connections in one process: what goes wrong on the way changes nothing that trains."""

import re
import time
from collections import Counter

import jax
import numpy as np
import pytest
import trustme
from fake_worlds import ANSWER, FACTS, FakeSampler, Proxy, Trainer, fair, several, until, weights

from jaxrl_llm.envs.turns import answered
from jaxrl_llm.rollout.turns import Tools
from jaxrl_llm.sampler.proto import rl_pb2
from jaxrl_llm.sampler.serving.access import Token, check_access
from jaxrl_llm.types import RunFailedError, Turn, UserError
from jaxrl_llm.weights.transfer import Borrower, Lender, Loan, Part
from jaxrl_llm.worlds.agreement import PROTOCOL
from jaxrl_llm.worlds.dialling import Credentials, own_address

TOKEN = "0123456789abcdef"


def test_samplers_join_by_themselves_and_by_name_and_leave():
    with several(2) as (dialled, comes), Trainer(dialled.address) as trainer:
        trainer.train(3)
        comes.register(trainer.fleet.address)
        until(lambda: trainer.kinds()["joined"] == 2)
        trainer.train(4)
        dialled.__exit__()
        until(lambda: trainer.kinds()["left"] == 1)
        trainer.train(4)
        trainer.balances()
        until(lambda: comes.world.service().health.version == trainer.version)
        trainer.fleet.finished = True
    assert comes.server.over.result(60) is None
    assert comes.said[-1] == "the run 'the run' has finished"
    (left,) = trainer.words("left")
    assert re.fullmatch(f"sampler {dialled.address} left: the (sampler was told to stop|connection is gone.*)", left)
    # Away for good is told when it leaves; that it cannot be reached either is told once.
    assert trainer.kinds()["unreachable"] <= 1


def test_a_sampler_that_was_restarted_gets_the_newest_weights_first():
    with FakeSampler() as sampler, Trainer(sampler.address, retry_s=0.05) as trainer:
        trainer.train(3)
        port = sampler.server.port
        sampler.__exit__()
        with FakeSampler(port=port) as again:
            trainer.train(3)
            until(lambda: trainer.kinds()["joined"] == 2)
            assert min(version for version, _ in again.pulled) >= 3 - 1  # not version 0, which it would begin with
            trainer.balances()
            words = trainer.words("joined")
            assert words[1].startswith(f"sampler {again.address} (life 2) joined with version")


def test_episodes_of_several_turns_go_on_wherever_there_is_room():
    def next_turn(task, completion):
        return Turn(answered(completion, np.array([ANSWER], np.int32)), more=2)

    with several(2) as (one, other), Trainer(one.address, other.address, tools=Tools(next_turn, 2)) as trainer:
        trainer.train(6)
        trainer.balances()
        one.__exit__()
        trainer.train(3)
        trainer.balances()


def test_a_push_cut_halfway_is_begun_anew_and_never_half_applied():
    cut = []

    def spoil(name, number, reply):
        if name == "Pull" and number == 2 and len(cut) < 2:
            cut.append(name)
            raise ConnectionError("cut")
        return 0.0, [reply]

    with FakeSampler() as sampler, Trainer(sampler.address) as trainer, Proxy(trainer.fleet.address, spoil) as proxy:
        trainer.fleet._distribution.root = trainer.fleet._distribution._fan_out._root = proxy.address
        trainer.train(4)  # FakeScheduler.step looks at every weight
        trainer.balances()
    assert len(cut) == 2
    assert trainer.kinds() == Counter(joined=1, push_failed=len(set(trainer.words("push_failed"))))
    assert re.search(r"could not fetch version \d: pulling .* failed: cut", trainer.words("push_failed")[0])


def test_late_acknowledgements_and_replies_that_come_twice_change_nothing():
    seen = Counter()

    def spoil(name, number, reply):
        seen[name] += 1
        if name in ("Offer", "Commit") and seen[name] % 2 == 0:
            return 0.4, [reply]  # later than push_timeout_s: it is asked again
        if name == "Sample":
            return 0.0, [reply, reply]
        return 0.0, [reply]

    with FakeSampler() as sampler, Proxy(sampler.address, spoil) as proxy:
        with Trainer(proxy.address, push_timeout_s=0.2) as trainer:
            trainer.train(6)
            trainer.balances()
            assert trainer.worker.exchange.counts()["duplicates"] > 0
        assert sampler.world.service  # it is still there
    assert trainer.kinds() == Counter(joined=1)


def test_a_sampler_that_falls_silent_leaves_the_run_and_comes_back_with_the_newest_weights():
    silent = False

    def spoil(name, number, reply):
        return (3600.0 if silent else 0.0), [reply]

    with (
        several(2) as (fast, stopped),
        Proxy(stopped.address, spoil) as proxy,
        Trainer(fast.address, proxy.address, silence_s=2.0, push_timeout_s=0.3) as trainer,
    ):
        until(lambda: trainer.kinds()["joined"] == 2)
        trainer.train(3)
        silent = True
        trainer.train(6)
        until(lambda: trainer.kinds()["left"] == 1)
        silent = False
        until(lambda: trainer.kinds()["joined"] == 3)
        trainer.train(3)
        trainer.balances()
    assert trainer.words("left") == [f"sampler {proxy.address} left: it has not answered for 2 s"]
    assert f"(life 2) joined with version {9}" in trainer.words("joined")[2]


def test_weights_spread_from_sampler_to_sampler():
    with several(6, load_s=0.05) as samplers, Trainer(*(s.address for s in samplers), fan_out=1) as trainer:
        until(lambda: trainer.kinds()["joined"] == 6)
        places = Counter(source for s in samplers for _, source in s.pulled)
        assert sum(places.values()) == 6
        assert places[trainer.fleet.address] < 6, places  # the others had it from those who had it first
        trainer.train(3)
        trainer.balances()
    assert trainer.kinds() == Counter(joined=6), trainer.words("push_failed")


def test_a_slow_sampler_gets_the_newest_version_and_not_a_queue():
    with several(1) as (fast,), FakeSampler(load_s=0.3) as slow, Trainer(fast.address, slow.address) as trainer:
        until(lambda: trainer.kinds()["joined"] == 2)
        for _ in range(12):
            trainer.train(1)
            time.sleep(0.05)
        until(lambda: slow.world.service().health.version == trainer.version)
        trainer.balances()
    versions = [version for version, _ in slow.pulled]
    assert versions == sorted(versions)
    assert len(versions) < 12


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (FACTS | {"model": "other"}, r"is not taken: the trainer has another model \(tiny there, other here\)"),
        (
            FACTS | {"tokenizer": "x"},
            r"another tokenizer \(abc there, x here\); start both from the same configuration",
        ),
    ],
)
def test_a_sampler_of_another_kind_is_refused_once_and_the_run_goes_on(facts, message):
    with several(1) as (good,), FakeSampler(facts=facts) as other, Trainer(good.address, other.address) as trainer:
        trainer.train(4)
        until(lambda: trainer.kinds()["refused"] == 1)
        trainer.fleet._loop.call_soon_threadsafe(lambda: trainer.fleet._links[other.address][0].poke())
        other.register(trainer.fleet.address)
        with pytest.raises(UserError, match=r"refuses this sampler: the sampler at .* has another"):
            other.server.over.result(60)
        trainer.train(2)
        trainer.balances()
    assert trainer.kinds()["refused"] == 2  # dialled, and registered: one line each
    assert re.search(message, trainer.words("refused")[0])


def test_another_version_of_the_protocol_is_refused(monkeypatch):
    with several(2) as (good, old), Trainer(good.address) as trainer:
        monkeypatch.setattr("jaxrl_llm.worlds.registration.PROTOCOL", PROTOCOL + 1)
        old.register(trainer.fleet.address)
        with pytest.raises(UserError, match=f"speaks version {PROTOCOL + 1} of the protocol, this side version"):
            old.server.over.result(60)
        trainer.train(2)
    assert trainer.kinds()["refused"] == 1


def test_wrong_tokens_are_refused_on_both_sides_and_never_shown():
    guarded = check_access("127.0.0.1", Token("another-token-0123"), None, None)
    right = {"credentials": Credentials(TOKEN), "access": check_access("127.0.0.1", Token(TOKEN), None, None)}
    with (
        several(1, **right) as (good,),
        FakeSampler(access=guarded) as other,
        FakeSampler(credentials=Credentials("a-wrong-token-0123")) as stranger,
        Trainer(good.address, other.address, token=TOKEN) as trainer,
    ):
        stranger.register(trainer.fleet.address)
        with pytest.raises(UserError, match="refuses this sampler: missing or wrong token"):
            stranger.server.over.result(60)
        trainer.train(3)
        until(lambda: trainer.kinds()["refused"] == 2)
    said = " ".join(words for _, words in trainer.notes)
    assert "somebody at ipv4:127.0.0.1 showed no token or a wrong one" in said
    assert f"sampler {other.address} is not taken: missing or wrong token" in said
    assert "token-0123" not in said
    assert TOKEN not in said


def test_with_tls_and_a_token_everything_is_as_without(tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    pair = authority.issue_cert("127.0.0.1")
    pair.private_key_pem.write_to_path(tmp_path / "key.pem")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    access = check_access("127.0.0.1", Token(TOKEN), tmp_path / "cert.pem", tmp_path / "key.pem")
    how = {"access": access, "credentials": Credentials(TOKEN, tmp_path / "authority.pem")}
    with several(2, **how) as (one, comes), Trainer(one.address, **how) as trainer:
        comes.register(trainer.fleet.address)
        until(lambda: trainer.kinds()["joined"] == 2)
        trainer.train(3)
        trainer.balances()
    plain = Credentials(TOKEN)
    with (
        FakeSampler(**how) as one,
        Trainer(one.address, credentials=plain, patience_s=1.0) as trainer,
        pytest.raises(RunFailedError),
    ):
        trainer.train(1)
    assert trainer.kinds()["joined"] == 0
    with pytest.raises(UserError, match=r"a token for example\.org:1 would travel unencrypted"):
        Credentials(TOKEN).channel("example.org:1")


def test_a_sampler_works_for_one_run_at_a_time():
    with several(2) as (shared, own), Trainer(shared.address) as first:
        first.train(2)
        with Trainer(shared.address, own.address, run="another") as second:
            second.train(3)
            until(lambda: second.kinds()["refused"] == 1)
        first.train(2)
        second.balances()
    assert second.words("refused") == [
        f"sampler {shared.address} is not taken: the sampler works for the run 'the run'"
    ]
    assert first.kinds() == Counter(joined=1)


def test_a_run_without_samplers_fails_by_name_and_in_time():
    trainer = Trainer("127.0.0.1:1", patience_s=0.5)
    with trainer, pytest.raises(RunFailedError, match=r"no sampler has been there for 0\.5 s"):
        trainer.train(1)
    assert trainer.words("unreachable") == [
        "sampler 127.0.0.1:1 cannot be reached: the connection is gone or was refused"
    ]


def test_weights_that_change_in_a_samplers_memory_end_its_part_in_the_run():
    with several(2) as (good, bad), Trainer(good.address, bad.address) as trainer:
        until(lambda: trainer.kinds()["joined"] == 2)
        trainer.train(2)
        bad.wire.flipped = True
        trainer.train(1)
        until(lambda: trainer.kinds()["refused"] == 1)
        trainer.train(2)
        trainer.balances()
    (left,), (refused,) = trainer.words("left"), trainer.words("refused")
    assert re.search(r"left: its weights have the digest [0-9a-f]{12}, version \d has [0-9a-f]{12}", left)
    assert re.search(f"sampler {bad.address} is not taken: its weights have the digest", refused)


def test_nobody_is_sent_to_an_address_that_is_no_machines():
    assert own_address("127.0.0.1", 9, None, "--advertise") == "127.0.0.1:9"
    assert own_address("::1", 9, None, "--advertise") == "[::1]:9"
    assert own_address("0.0.0.0", 9, "there:8", "--advertise") == "there:8"
    for everywhere in ("0.0.0.0", "::"):
        with pytest.raises(UserError, match="does not say where others reach this machine; give --advertise too"):
            own_address(everywhere, 9, None, "--advertise")


def test_samplers_are_found_through_a_file(tmp_path):
    file = tmp_path / "samplers"
    with several(2) as (one, other), Trainer(f"file:{file}") as trainer:
        file.write_text(f"{one.address}\n")
        trainer.train(2)
        file.write_text(f"# two now\n{one.address}\n{other.address}\n{'half a li'}")
        until(lambda: trainer.kinds()["joined"] == 2)
    assert trainer.kinds() == Counter(joined=2)


def test_a_piece_that_was_not_asked_for_is_a_failed_attempt():
    spoiled = []

    def spoil(name, number, reply):
        if name == "Sample" and number == 3 and not spoiled:  # the first draw's tokens
            spoiled.append(name)
            piece = rl_pb2.Piece.FromString(reply)
            del piece.logprobs[:]
            return 0.0, [piece.SerializeToString()]
        return fair(name, number, reply)

    with FakeSampler() as sampler, Proxy(sampler.address, spoil) as proxy, Trainer(proxy.address) as trainer:
        trainer.train(3)
        trainer.balances()
    assert trainer.kinds() == Counter(joined=1, retried=1)
    assert "it answered something else than was asked" in trainer.words("retried")[0]


def transferring():
    return {"borrower": Borrower("127.0.0.1", jax.devices()), "lender": Lender("127.0.0.1")}


def test_weights_go_from_device_to_device_and_on_to_the_next_sampler():
    with (
        FakeSampler(**transferring()) as one,
        FakeSampler(**transferring()) as other,
        Trainer(one.address, other.address, lends=True, fan_out=1) as trainer,
    ):
        until(lambda: trainer.kinds()["joined"] == 2)
        trainer.train(4)
        trainer.balances()
    assert trainer.kinds() == Counter(joined=2)  # and no fallback: every sampler's digest was read back


def test_a_transfer_that_never_comes_falls_back_to_chunks_and_is_told_once(monkeypatch):
    monkeypatch.setattr(Lender, "lend", lambda self, leaves: Loan(12345, tuple(whole_parts(leaves))))  # never offered
    with (
        FakeSampler(borrower=(borrower := Borrower("127.0.0.1", jax.devices()))) as sampler,
        Trainer(sampler.address, lends=True, push_timeout_s=0.5) as trainer,
    ):
        trainer.train(4)
        trainer.balances()
        assert borrower.hangs
        trainer.fleet._lender._server.await_pull(12345, [weights(0)["b"], weights(0)["w"]])
        until(lambda: not borrower.hangs)  # no thread outlives the test
    assert trainer.kinds() == Counter(joined=1, push_fallback=1)
    assert re.search("in chunks .* sent nothing for 0.5 s", trainer.words("push_fallback")[0])


def whole_parts(leaves):
    return [Part(path, leaf.shape, leaf.dtype.name, (0,) * leaf.ndim) for path, leaf in leaves.items()]
