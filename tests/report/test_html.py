"""The report: complete, self-contained, and safe against what a model writes."""

import base64
import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from jaxrl_llm.report import charts
from jaxrl_llm.report.html import write_report
from jaxrl_llm.report.run_files import read_run
from jaxrl_llm.types import UserError


class Tags(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def few_evaluations(run_dir, count: int) -> str:
    path = run_dir / "eval.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:count]))
    return write_report(run_dir).read_text()


def test_every_section_and_chart_is_there(reported_run):
    page = (reported_run / "report.html").read_text()
    tags = Tags(page).found
    sections = [attrs["id"] for tag, attrs in tags if tag == "section"]
    assert sections == ["headline", "forecast", "training", "ledger", "samples", "setup"]
    images = [attrs for tag, attrs in tags if tag == "img"]
    assert [image["alt"] for image in images] == [
        *("Evaluation curve", "Evaluation curve, logarithmic compute", "Accuracy", "Reward", "Completion length"),
        *("Entropy", "Truncation rate", "Gradient norm", "Lag histogram", "Lag by step", "Sampler-trainer mismatch"),
        *("Importance ratio", "Throughput", "Idle time"),
    ]
    for image in images:
        head, data = image["src"].split(",", 1)
        assert head == "data:image/svg+xml;base64"
        drawing = base64.b64decode(data).decode()
        assert "<svg" in drawing
        assert len(re.findall(r"<path", drawing)) > 15, image["alt"]
    assert "Not recorded" not in page
    assert "To be read with care" not in page
    text = html.unescape(re.sub(r"<[^>]+>", " ", page))
    for wanted in (
        "mean@4, last",
        "0.853",
        "bound 8",
        "7.00e-06",
        "3.00%",
        "3,667",
        "zero variance",
        "2,088",
        "train:",
    ):
        assert wanted in text, wanted
    fit = json.loads((reported_run / "fit.json").read_text())
    assert f"{fit['fit']['A']:.3f}" in text
    assert f"{fit['forecast_error']:.4f}" in text


def test_a_mixture_shows_the_curve_and_the_fit_of_each_source(mixture_dir):
    page = write_report(mixture_dir).read_text()
    images = [attrs["alt"] for tag, attrs in Tags(page).found if tag == "img"]
    assert images[2:4] == ["Evaluation curve of sums", "Evaluation curve of tokens"]
    rows = re.findall(
        r"<td>((?:first half|entire curve), [^<]*)</td><td class=\"n\">(\d+)</td><td class=\"n\">(.*?)<", page
    )
    assert len(rows) == 2 * 3 + 2 * 2
    fitted = {label: float(A) for label, _, A in rows}
    assert fitted["entire curve, sums over FLOPs"] == pytest.approx(0.95, abs=0.02)
    assert fitted["entire curve, tokens over FLOPs"] == pytest.approx(0.75, abs=0.02)
    assert fitted["entire curve, tokens"] == pytest.approx(0.85, abs=0.02)  # all prompts, over sampled tokens
    (drawn,) = [figure for title, _, figure in charts.training_charts(read_run(mixture_dir)) if title == "Accuracy"]
    _, labels = drawn.axes[0].get_legend_handles_labels()
    assert labels[-2:] == ["sums", "tokens"]
    np.testing.assert_allclose(drawn.axes[0].lines[-1].get_ydata()[-1], 0.75 - 0.45 / (1 + 3.2**2), atol=0.02)


def test_nothing_is_loaded_from_elsewhere(reported_run):
    page = (reported_run / "report.html").read_text()
    tags = Tags(page).found
    assert not [tag for tag, _ in tags if tag in {"script", "link", "iframe", "object"}]
    assert all(value.startswith("data:") for _, attrs in tags for key, value in attrs.items() if key in {"src", "href"})
    assert "http://" not in page
    assert "https://" not in page


def test_completions_cannot_inject(run_dir):
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ name }}{% raw %}</pre></td>&amp;\ud800"
    sample = {"step": 1, "prompt": attack, "completion": attack, "answer": attack, "reward": "<b>", "finish": attack}
    (run_dir / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (run_dir / "config.yaml").write_text("name: <script>alert(3)</script>\n")
    (run_dir / "state.json").write_text(json.dumps({"state": '"><script>', "message": "<script>", "step": 1}))
    page = few_evaluations(run_dir, 1)
    tags = Tags(page).found
    assert not [tag for tag, _ in tags if tag == "script"]
    assert not [attrs for _, attrs in tags if "onerror" in attrs]
    shown = re.findall(r"<td><pre>(.*?)</pre></td>", page, flags=re.DOTALL)
    assert len(shown) == 3
    assert html.unescape(shown[1]) == attack.replace("\ud800", "?")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_evaluations_say_why_there_is_no_forecast(run_dir, count):
    page = few_evaluations(run_dir, count)
    reason = re.search(r'id="no-forecast">(.*?)</p>', page, flags=re.DOTALL).group(1)
    assert "No forecast: of" in reason
    assert "points at positive compute are too few to fit 3 parameters" in reason
    images = [attrs["alt"] for tag, attrs in Tags(page).found if tag == "img"]
    assert ("Evaluation curve" in images, "Evaluation curve, logarithmic compute" in images) == (count > 1, count > 2)
    assert "Accuracy" in images


def test_no_evaluations_and_no_metrics(run_dir):
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "environment.json"):
        (run_dir / name).unlink()
    page = write_report(run_dir).read_text()
    assert page.count("Not recorded by this run") == 12
    assert not [tag for tag, _ in Tags(page).found if tag == "img"]


def test_missing_keys_and_a_truncated_line(run_dir):
    lines = [{"step": step, "reward_mean": 0.1 * step, "surprise": "x"} for step in range(1, 9)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "rew')
    page = few_evaluations(run_dir, 1)
    images = [attrs["alt"] for tag, attrs in Tags(page).found if tag == "img"]
    assert images == ["Accuracy", "Reward", "Sampler-trainer mismatch"]
    assert page.count("Not recorded by this run") == 9


def test_what_should_worry_is_said(run_dir):
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1] |= {"lag_max": 9, "prompts_trained": 1700, "entropy": float("nan")}
    for line in lines:
        line["truncation_rate"] = 0.2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "garbage\n")
    page = few_evaluations(run_dir, 1)
    found = html.unescape(re.search(r'id="warnings">(.*?)</div>', page, flags=re.DOTALL).group(1))
    for wanted in (
        "lag reached 9, beyond its bound 8",
        "20.0% of the completions were truncated",
        "92 prompts issued are neither",
        "1 steps hold numbers that are not finite",
        "1 lines of metrics.jsonl could not be read",
    ):
        assert wanted in found, wanted


def test_lag_histogram_adds_up_over_steps(run_dir):
    (run_dir / "metrics.jsonl").write_text(
        '{"step": 1, "lag_histogram": [30], "lag_bound": 3}\n'
        '{"step": 2, "lag_histogram": [0, 10, 60], "lag_bound": 3}\n'
    )
    axes = charts.lag_histogram(read_run(run_dir)).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [0.3, 0.1, 0.6, 0.0]


def test_idle_is_the_share_of_the_step(run_dir):
    axes = charts.idle(read_run(run_dir)).axes[0]
    assert axes.lines[0].get_ydata()[0] == pytest.approx(0.1 / 0.6)
    assert axes.lines[1].get_ydata()[0] == pytest.approx(0.05 / 0.6)


def test_a_long_run_is_thinned_without_losing_its_largest_lag(run_dir):
    lines = [{"step": step, "lag_max": 7 if step == 1501 else 1, "lag_bound": 8} for step in range(3000)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = charts.lag(read_run(run_dir)).axes[0].lines[0]
    assert len(line.get_xdata()) == 600
    assert line.get_ydata().max() == 7


def test_not_a_run_directory(tmp_path):
    with pytest.raises(UserError, match="no run directory"):
        write_report(tmp_path)
