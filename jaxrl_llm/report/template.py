"""The report's page. Every value is escaped by jinja2: completions are text that a model made up."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ name }} - run report</title>
<style>
:root { --ink: #1f2933; --muted: #616e7c; --line: #e4e7eb; --soft: #f5f7fa; --accent: #1f4e79; --warn: #9c5400; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--soft); color: var(--ink); line-height: 1.45;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1220px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 2px; }
h2 { font-size: 19px; margin: 36px 0 12px; }
h3 { font-size: 15px; margin: 0; }
p { margin: 4px 0; }
.sub, .how { color: var(--muted); }
.how { font-size: 13px; }
.badge { display: inline-block; padding: 1px 10px; border-radius: 10px; font-size: 13px; background: #dde6ef; }
.badge.finished { background: #d5ebdd; } .badge.failed, .badge.interrupted { background: #f6dfc8; }
.tiles { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 12px; margin-top: 18px; }
.tile, .card { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; min-width: 0; }
.tile .label { color: var(--muted); font-size: 13px; }
.tile .value { font-size: 23px; font-weight: 600; overflow-wrap: anywhere; }
.tile .note { color: var(--muted); font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.card img { display: block; width: 100%; height: auto; margin-top: 6px; }
.missing { color: var(--muted); padding: 22px 0 10px; }
.warnings { background: #fff7ec; border: 1px solid #f0d9b8; border-radius: 8px; padding: 10px 16px; margin-top: 14px; }
.warnings ul { margin: 4px 0; padding-left: 20px; }
.warnings li { color: var(--warn); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.n + td, th.n + th { padding-left: 14px; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
.samples { table-layout: fixed; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--accent); }
details pre { margin-top: 8px; max-height: 480px; overflow: auto; }
@media (max-width: 860px) { .tiles { grid-template-columns: repeat(2, 1fr); } .grid { grid-template-columns: 1fr; } }
</style>
</head>
<body>
<main>
<h1>{{ name }}</h1>
<p class="sub"><span class="badge {{ state }}">{{ state }}</span>
step {{ summary.steps }}{% if summary.steps_planned is not none %} of {{ summary.steps_planned }}{% endif %}
{%- if summary.message %} &middot; {{ summary.message }}{% endif %}</p>

<section id="headline">
<div class="tiles">
{%- for tile in tiles %}
<div class="tile"><div class="label">{{ tile.label }}</div><div class="value">{{ tile.value }}</div>
<div class="note">{{ tile.note }}</div></div>
{%- endfor %}
</div>
{%- if warnings %}
<div class="warnings" id="warnings"><strong>To be read with care</strong>
<ul>{% for text in warnings %}<li>{{ text }}</li>{% endfor %}</ul></div>
{%- endif %}
</section>

<section id="forecast">
<h2>Curve and forecast</h2>
{%- if reason %}<p id="no-forecast">No forecast: {{ reason }}.</p>{% else %}
<p class="how">ScaleRL's sigmoid R = R0 + (A - R0) / (1 + (C_mid / C)^B), fitted on the first half of the compute
(solid) and drawn against the second half (dashed, open points).
Intervals are at 95&nbsp;%, from a residual bootstrap.</p>
{%- endif %}
{%- if curve_figures %}
<div class="grid">
{%- for figure in curve_figures %}
<div class="card"><h3>{{ figure.title }}</h3><img src="{{ figure.src }}" alt="{{ figure.title }}"></div>
{%- endfor %}
</div>
{%- endif %}
{%- if fit_rows %}
<div class="card" style="margin-top:14px">
<table>
<tr><th>fitted over</th><th class="n">points</th><th class="n">A</th><th>95 %</th><th class="n">B</th><th>95 %</th>
<th class="n">C_mid</th><th>95 %</th><th class="n">R0</th><th class="n">error on held-out half</th></tr>
{%- for row in fit_rows %}
{%- if row.reason %}
<tr><td>{{ row.label }}</td><td colspan="9" class="sub">not fitted: {{ row.reason }}</td></tr>
{%- else %}
<tr><td>{{ row.label }}</td><td class="n">{{ row.points }}</td><td class="n">{{ row.A }}</td>
<td>{{ row.A_interval }}</td><td class="n">{{ row.B }}</td><td>{{ row.B_interval }}</td>
<td class="n">{{ row.C_mid }}</td><td>{{ row.C_mid_interval }}</td>
<td class="n">{{ row.R0 }}</td><td class="n">{{ row.error }}</td></tr>
{%- endif %}
{%- endfor %}
</table>
</div>
{%- endif %}
</section>

<section id="training">
<h2>Training</h2>
<div class="grid">
{%- for chart in charts %}
<div class="card" id="chart-{{ chart.id }}"><h3>{{ chart.title }}</h3><div class="how">{{ chart.how }}</div>
{%- if chart.src %}<img src="{{ chart.src }}" alt="{{ chart.title }}">
{%- else %}<p class="missing">Not recorded by this run.</p>{% endif %}</div>
{%- endfor %}
</div>
</section>

<section id="ledger">
<h2>Ledger</h2>
<div class="grid">
<div class="card"><h3>Prompts</h3>
<table>
{%- for label, value in prompts %}

<tr><td>{{ label }}</td><td class="n">{{ value }}</td></tr>
{%- endfor %}

</table></div>
<div class="card"><h3>Totals</h3>
<table>
{%- for label, value in totals %}

<tr><td>{{ label }}</td><td class="n">{{ value }}</td></tr>
{%- endfor %}

</table></div>
</div>
</section>

<section id="samples">
<h2>Sample completions</h2>
{%- if samples %}
<div class="card"><table class="samples">
<tr><th style="width:60px">step</th><th style="width:34%">prompt</th><th>completion</th>
<th style="width:15%">answer</th>
<th class="n" style="width:70px">reward</th><th style="width:80px">finish</th></tr>
{%- for sample in samples %}
<tr><td>{{ sample.step }}</td><td><pre>{{ sample.prompt }}</pre></td><td><pre>{{ sample.completion }}</pre></td>
<td><pre>{{ sample.answer }}</pre></td><td class="n">{{ sample.reward }}</td><td>{{ sample.finish }}</td></tr>
{%- endfor %}
</table></div>
{%- else %}<p class="sub">None recorded.</p>{% endif %}
</section>

<section id="setup">
<h2>Setup</h2>
<div class="card">
{%- if config_text %}<details><summary>Configuration</summary><pre>{{ config_text }}</pre></details>{% endif %}
{%- if environment_text %}<details><summary>Environment</summary><pre>{{ environment_text }}</pre></details>{% endif %}
{%- if not config_text and not environment_text %}<p class="sub">None recorded.</p>{% endif %}
</div>
</section>
</main>
</body>
</html>
"""
