"""`jaxrl simulate` through the command."""

import json


def test_simulate_recommends_a_split_as_json(tiny, jaxrl, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"train_token_chip_s": 1e-3, "decode_step_s": 1e-3, "lengths": [2, 3, 3]}))
    status, out, err = jaxrl("simulate", tiny, "--costs", costs, "--chips", 4, "rollout.max_lag=2", "--steps", 12)
    assert status == 0, err
    found = json.loads(out)
    assert len(found["splits"]) == 3
    best = found["recommended"]
    assert best == min(found["splits"], key=lambda row: row["step_s"])
    assert (best["trainer_chips"], best["samplers"]) == (3, 1)  # training costs the most
    assert 0 <= best["trainer_idle"] < 1
    assert best["lag_max"] <= 2
    status, _, err = jaxrl("simulate", tiny, "--costs", tmp_path / "none.json", "--chips", 4)
    assert (status, err.count("\n")) == (2, 1)
    assert "none.json cannot be read" in err
