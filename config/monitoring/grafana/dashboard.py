"""Generates the Grafana dashboard: `python3 dashboard.py > mainstem.json`."""

import json
import sys

WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = 'model_name=~"$model_name", instance=~"$instance"'
OPEN_BATCHES = 'status=~"validating|in_progress|finalizing|cancelling"'


def series(metric, labels=""):
    """Returns the series of a metric of the selected servers."""
    return f"{metric}{{{CHOSEN}{', ' if labels else ''}{labels}}}"


def rate(metric, labels="", by=""):
    """Returns the rate of a counter per second, summed over the selected servers."""
    return f"sum{f' by ({by})' if by else ''} (rate({series(metric, labels)}[$__rate_interval]))"


def total(metric):
    return f"sum({series(metric)})"


def quantile(share, histogram, labels=""):
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', labels, by='le')})"


def mean(histogram):
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


def panel(kind, title, unit, targets, width=8, height=8, describe="", **custom):
    """Returns a panel; `targets` are pairs of legend and expression."""
    return {
        "type": kind,
        "title": title,
        "description": describe,
        "datasource": SOURCE,
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for number, (legend, expr) in enumerate(targets)
        ],
    }


def stat(title, unit, expr, describe="", text="value", legend=""):
    made = panel("stat", title, unit, [(legend, expr)], width=3, height=4, describe=describe)
    made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": text, "colorMode": "none"}
    return made


def graph(title, unit, targets, describe="", width=8, stacked=False):
    stacking = {"mode": "normal"} if stacked else {"mode": "none"}
    return panel(
        "timeseries",
        title,
        unit,
        targets,
        width,
        describe=describe,
        stacking=stacking,
        fillOpacity=30 if stacked else 0,
    )


def quantiles(title, unit, histogram, describe="", width=8):
    shares = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)]
    return graph(title, unit, [(name, quantile(share, histogram)) for name, share in shares], describe, width)


ROWS = {
    "Overview": [
        stat("Version", "none", series("mainstem_build_info"), text="name", legend="{{version}}"),
        stat("Running", "none", total("mainstem_num_requests_running"), "Requests in prefill or decode."),
        stat("Waiting", "none", total("mainstem_num_requests_waiting"), "Requests in the queue."),
        stat(
            "KV cache",
            "percentunit",
            f"max({series('mainstem_kv_cache_usage_perc')})",
            "Fraction of the KV pages that is held by sequences.",
        ),
        stat("Tokens out", "suffix: tokens/s", rate("mainstem_generation_tokens_total")),
        stat("First token, p99", "s", quantile(0.99, "mainstem_time_to_first_token_seconds")),
        stat("Between tokens, p99", "s", quantile(0.99, "mainstem_inter_token_latency_seconds")),
        stat(
            "Device restarts, 1 d", "none", f"sum(increase({series('mainstem_device_restarts_total')}[1d]))"
        ),
    ],
    "Latency": [
        quantiles("Time to first token", "s", "mainstem_time_to_first_token_seconds"),
        quantiles("Between tokens", "s", "mainstem_inter_token_latency_seconds"),
        quantiles("Whole request", "s", "mainstem_e2e_request_latency_seconds"),
        graph(
            "Mean request time by stage",
            "s",
            [
                ("queue", mean("mainstem_request_queue_time_seconds")),
                ("prefill", mean("mainstem_request_prefill_time_seconds")),
                ("decode", mean("mainstem_request_decode_time_seconds")),
            ],
            stacked=True,
        ),
        graph(
            "Queue time by class, p99",
            "s",
            [
                (name, quantile(0.99, "mainstem_request_queue_time_seconds", f'class="{name}"'))
                for name in ("interactive", "batch")
            ],
            "Time from accepting a request to the step with its first prompt chunk.",
        ),
        quantiles("Inference: prefill and decode", "s", "mainstem_request_inference_time_seconds"),
        quantiles("Time per output token, by request", "s", "mainstem_request_time_per_output_token_seconds"),
    ],
    "Throughput": [
        graph(
            "Tokens",
            "suffix: tokens/s",
            [("in", rate("mainstem_prompt_tokens_total")), ("out", rate("mainstem_generation_tokens_total"))],
        ),
        graph(
            "Requests by finish reason",
            "reqps",
            [("{{finished_reason}}", rate("mainstem_request_success_total", by="finished_reason"))],
            stacked=True,
        ),
        graph(
            "Rejections by reason",
            "reqps",
            [("{{reason}}", rate("mainstem_admission_rejections_total", by="reason"))],
            stacked=True,
        ),
        graph(
            "Rejected parameters and ignored fields",
            "reqps",
            [
                ("{{param}}", rate("mainstem_rejected_parameters_total", by="param")),
                ("ignored fields", rate("mainstem_ignored_fields_total")),
            ],
            "Fields that the server does not know are ignored; the log names them.",
            width=12,
        ),
        graph(
            "Requests by sampling strategy",
            "reqps",
            [("{{strategy}}", rate("mainstem_requests_by_strategy_total", by="strategy"))],
            "A request with several strategies counts for each.",
            width=12,
        ),
        quantiles("Prompt length", "none", "mainstem_request_prompt_tokens", width=12),
        quantiles("Answer length", "none", "mainstem_request_generation_tokens", width=12),
        quantiles("Maximum answer length asked for", "none", "mainstem_request_params_max_tokens", width=12),
        quantiles("Choices asked for", "none", "mainstem_request_params_n", width=8),
        stat(
            "KV cache format",
            "none",
            series("mainstem_cache_config_info"),
            text="name",
            legend="{{cache_dtype}}, {{num_gpu_blocks}} pages of {{block_size}}",
        ),
    ],
    "Decode loop": [
        graph(
            "Slots",
            "none",
            [
                ("all", total("mainstem_slots")),
                ("in use", total("mainstem_slots_live")),
                ("in a step, mean", mean("mainstem_step_slots")),
            ],
        ),
        graph(
            "Requests",
            "none",
            [
                ("running", total("mainstem_num_requests_running")),
                ("waiting", total("mainstem_num_requests_waiting")),
                ("queue capacity", total("mainstem_queue_capacity")),
            ],
        ),
        graph(
            "KV pages",
            "none",
            [
                ("all, or of layers without a window", total("mainstem_kv_pages")),
                ("of layers with a window", total("mainstem_kv_window_pages")),
            ],
        ),
        graph(
            "Between memory and disk, or device and host",
            "Bps",
            [("{{stream}}, {{tier}}", rate("mainstem_offload_bytes_total", by="stream, tier"))],
            "Weights and KV caches of layers that are on disk, or in the memory of the host.",
        ),
        graph(
            "Time waited for the disk",
            "percentunit",
            [("{{stream}}", rate("mainstem_offload_stall_seconds_sum", by="stream"))],
            "Fraction of the time in which devices wait for weights or KV caches.",
        ),
        graph(
            "Layers on disk that were ready",
            "percentunit",
            [
                (
                    "ready",
                    rate("mainstem_offload_layers_total", 'state="ready"')
                    + " / "
                    + rate("mainstem_offload_layers_total"),
                )
            ],
            "Fraction of layers that were in a buffer when they were needed.",
        ),
        graph(
            "Buffers for weights on disk that were ready",
            "percentunit",
            [
                (
                    "ready",
                    rate("mainstem_offload_ready_buffers_ratio_sum")
                    + " / "
                    + rate("mainstem_offload_ready_buffers_ratio_count"),
                )
            ],
            "Mean fraction when a layer is needed. Near 1: computing limits the speed; near 0: the disk does.",
        ),
        graph(
            "Chosen experts that were in memory",
            "percentunit",
            [
                (
                    "hits",
                    rate("mainstem_offload_experts_total", 'result="hit"')
                    + " / "
                    + rate("mainstem_offload_experts_total"),
                )
            ],
            "Fraction of the experts chosen by rows that were in the pool, for mixtures with experts on disk.",
        ),
        graph(
            "KV pages held by sequences",
            "percentunit",
            [("held", f"max({series('mainstem_kv_cache_usage_perc')})")],
            "Fraction; the larger one if sliding-window layers have pages of their own.",
        ),
        graph(
            "Prefix cache hit rate",
            "percentunit",
            [
                (
                    "hit rate",
                    f"{rate('mainstem_prefix_cache_hits_total')} / {rate('mainstem_prefix_cache_queries_total')}",
                )
            ],
            "Fraction of the tokens looked up that were in the prefix cache.",
        ),
        graph(
            "Draft acceptance rate",
            "percentunit",
            [
                (
                    "accepted",
                    f"{rate('mainstem_spec_decode_num_accepted_tokens_total')} / {rate('mainstem_spec_decode_num_draft_tokens_total')}",
                )
            ],
            "Speculative decoding: fraction of the drafted tokens that were accepted.",
        ),
        graph("Preemptions", "ops", [("{{reason}}", rate("mainstem_num_preemptions_total", by="reason"))], stacked=True),
        graph(
            "Accepted drafts by position",
            "ops",
            [
                ("drafts", rate("mainstem_spec_decode_num_drafts_total")),
                (
                    "position {{position}}",
                    rate("mainstem_spec_decode_num_accepted_tokens_per_pos_total", by="position"),
                ),
            ],
            "Speculative decoding: drafts, and those whose token at a position was accepted, per second.",
        ),
        graph(
            "Fraction of wall time by phase",
            "percentunit",
            [("{{phase}}", rate("mainstem_step_phase_seconds_sum", by="phase"))],
            "Gap, forward and sample are on the device, where gap is waiting for the next step; plan and deliver run on the control thread, partly at the same time.",
            stacked=True,
        ),
        quantiles("Step", "s", "mainstem_step_seconds"),
        graph(
            "Host sampling time per token, mean",
            "s",
            [
                (
                    "{{work}}",
                    f"{rate('mainstem_host_sampling_seconds_sum', by='work')} / {rate('mainstem_host_sampling_seconds_count', by='work')}",
                )
            ],
            "Draws of tokens that the device cannot draw, and masks of grammars.",
        ),
        graph(
            "Rows and tokens of a step, mean",
            "none",
            [("rows", mean("mainstem_step_rows")), ("tokens", mean("mainstem_iteration_tokens"))],
            "Rows without a token are holes between slots, whose computation is wasted.",
        ),
        graph(
            "Steps",
            "ops",
            [
                ("steps", rate("mainstem_step_seconds_count")),
                ("wasted rows", rate("mainstem_wasted_rows_total")),
                ("rows that are not finite", rate("mainstem_non_finite_rows_total")),
            ],
        ),
        graph(
            "Closing holes",
            "ops",
            [
                ("shuffles", rate("mainstem_slot_shuffles_total")),
                ("moves", rate("mainstem_slot_moves_total")),
            ],
        ),
        graph(
            "Constrained requests",
            "reqps",
            [("{{kind}}", rate("mainstem_constrained_requests_total", by="kind"))],
            width=12,
        ),
        quantiles("Compilation of grammars", "s", "mainstem_grammar_compile_seconds", width=12),
    ],
    "HTTP": [
        graph(
            "Requests by path",
            "reqps",
            [("{{method}} {{path}}", rate("mainstem_http_requests_total", by="method, path"))],
            width=12,
        ),
        graph(
            "Requests by status",
            "reqps",
            [("{{status}}", rate("mainstem_http_requests_total", by="status"))],
            width=12,
        ),
        graph(
            "Batches that have not ended",
            "none",
            [("{{status}}", f"sum by (status) ({series('mainstem_batches', OPEN_BATCHES)})")],
            width=12,
        ),
        graph(
            "Requests of batches",
            "reqps",
            [("{{outcome}}", rate("mainstem_batch_requests_total", by="outcome"))],
            width=12,
        ),
    ],
    "Errors": [
        graph(
            "5xx responses",
            "reqps",
            [("{{path}} {{status}}", rate("mainstem_http_requests_total", 'status=~"5.."', "path, status"))],
        ),
        graph(
            "Requests that did not complete",
            "reqps",
            [
                (
                    "{{finished_reason}}",
                    rate(
                        "mainstem_request_success_total",
                        'finished_reason=~"abort|error|timeout"',
                        "finished_reason",
                    ),
                ),
                ("client disconnected", rate("mainstem_clients_gone_total")),
            ],
        ),
        graph(
            "Device restarts",
            "none",
            [("restarts", f"sum(increase({series('mainstem_device_restarts_total')}[$__rate_interval]))")],
        ),
        graph(
            "Connections",
            "none",
            [
                ("open", total("mainstem_connections")),
                ("refused or closed, {{reason}}", rate("mainstem_connections_closed_total", by="reason")),
            ],
        ),
        graph(
            "Injected faults",
            "none",
            [
                (
                    "{{kind}}",
                    f"sum by (kind) (increase({series('mainstem_injected_faults_total')}[$__rate_interval]))",
                )
            ],
        ),
        graph(
            "Log lines that were not written",
            "none",
            [("lines", f"sum(increase({series('mainstem_log_lines_dropped_total')}[$__rate_interval]))")],
        ),
        graph(
            "Spans of traces",
            "none",
            [("{{result}}", f"sum by (result) (increase({series('mainstem_trace_spans_total')}[$__rate_interval]))")],
        ),
    ],
}


def placed(rows):
    """Returns the panels and rows with their ids and positions."""
    panels, y = [], 0
    for title, members in rows.items():
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
        )
        x, y = 0, y + 1
        for member in members:
            place = member["gridPos"]
            if x + place["w"] > WIDTH:
                x, y = 0, y + place["h"]
            place.update(x=x, y=y)
            x += place["w"]
            panels.append(member)
        y += members[-1]["gridPos"]["h"]
    return [{"id": number, **each} for number, each in enumerate(panels, 1)]


def variable(name, label, kind, query, **more):
    return {"name": name, "label": label, "type": kind, "query": query, "refresh": 1, **more}


def values(name, label, query):
    """Returns a variable over a label's values, with all values selected by default."""
    everything = {"text": "All", "value": "$__all"}
    return variable(
        name,
        label,
        "query",
        query,
        datasource=SOURCE,
        includeAll=True,
        multi=True,
        allValue=".*",
        current=everything,
    )


DASHBOARD = {
    "uid": "mainstem",
    "title": "Mainstem",
    "tags": ["mainstem"],
    "schemaVersion": 39,
    "version": 1,
    "editable": True,
    "refresh": "10s",
    "time": {"from": "now-1h", "to": "now"},
    "templating": {
        "list": [
            variable("datasource", "Source", "datasource", "prometheus"),
            values("model_name", "Model", "label_values(mainstem_build_info, model_name)"),
            values(
                "instance",
                "Instance",
                'label_values(mainstem_build_info{model_name=~"$model_name"}, instance)',
            ),
        ]
    },
    "annotations": {"list": []},
    "panels": placed(ROWS),
}

json.dump(DASHBOARD, sys.stdout, indent=1)
print()
