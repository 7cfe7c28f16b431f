//! Plan as a text table.
//!
//! Invariant: it has the same contents as the JSON output.

use super::{DeviceFigures, LinkFigures, PartitionPlan, PlannedPartition, PredictedFigures};
use std::fmt::Write;

const HEAD: [&str; 7] = ["partition", "devices", "layers", "decode", "one lane", "lanes", "largest device"];

/// Formats the plan, one line per partition.
pub fn text(plan: &PartitionPlan) -> String {
    let mut text = head(plan);
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(plan.partitions.iter().map(cells));
    let width = |column: usize| lines.iter().map(|cells| cells[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; HEAD.len()] = std::array::from_fn(width);
    for cells in &lines {
        let mut line = String::new();
        for (column, (cell, width)) in cells.iter().zip(widths).enumerate() {
            // Numbers are aligned to the right.
            let _ = match column {
                3..=5 => write!(line, "{cell:>width$}  "),
                _ => write!(line, "{cell:<width$}  "),
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    for planned in &plan.partitions {
        if let Some(rejected) = &planned.rejected {
            let _ = writeln!(text, "note: {rejected}");
        }
    }
    text + "Tokens per second: decode is one sequence; one lane is one step at a time; lanes is one step in \
            flight per stage.\n"
}

fn head(plan: &PartitionPlan) -> String {
    let (model, machine) = (&plan.model, &plan.hardware);
    let mut text =
        format!("model:    {}, {} layers, {}\n", model.name, model.layers, bytes(model.weight_bytes));
    let _ = writeln!(text, "hardware: {}", machine.name);
    for alike in machine.devices.chunk_by(|a, b| device_text(a) == device_text(b)) {
        let _ = writeln!(text, "devices:  {} of {}", alike.len(), device_text(&alike[0]));
    }
    let together = [machine.bandwidth_together.map(speed), machine.memory_together.map(bytes)];
    let together = together.into_iter().flatten().collect::<Vec<_>>().join(" and ");
    if !together.is_empty() {
        let _ = writeln!(text, "          {together} shared by all");
    }
    let _ = match machine.within == machine.between {
        true => writeln!(text, "links:    {}", link(&machine.within)),
        false => writeln!(
            text,
            "links:    {} within a stage, {} between stages",
            link(&machine.within),
            link(&machine.between)
        ),
    };
    let sequences =
        if plan.batch == 1 { "1 sequence".to_owned() } else { format!("{} sequences", plan.batch) };
    text + &format!("load:     {sequences} per step, {} cached tokens each\n\n", plan.context)
}

fn device_text(device: &DeviceFigures) -> String {
    let DeviceFigures { bandwidth, memory, flops, op_us, .. } = device;
    let memory = memory.map_or(String::new(), |memory| format!(", {}", bytes(memory)));
    format!("{} and {:.2} Tflop/s, {op_us:.1} us per operation{memory}", speed(*bandwidth), flops / 1e12)
}

fn link(link: &LinkFigures) -> String {
    format!("{:.1} us and {}", link.latency_us, speed(link.bandwidth))
}

fn cells(planned: &PlannedPartition) -> [String; HEAD.len()] {
    let mark = if planned.configured { " (configured)" } else { "" };
    let name = format!("{}{mark}", planned.strategy);
    let Some(figures) = &planned.figures else {
        let nothing = String::new;
        return [
            name,
            planned.devices.clone(),
            "rejected".to_owned(),
            nothing(),
            nothing(),
            nothing(),
            nothing(),
        ];
    };
    let PredictedFigures { layers, decode_tokens_per_s, throughput_one_lane, throughput_lanes, fits, .. } =
        figures;
    let largest = figures.bytes.iter().flatten().copied().fold(0.0, f64::max);
    let verdict = if *fits { "fits" } else { "does not fit" };
    [
        name,
        planned.devices.clone(),
        layers.iter().map(usize::to_string).collect::<Vec<_>>().join(","),
        format!("{decode_tokens_per_s:.1}"),
        format!("{throughput_one_lane:.1}"),
        format!("{throughput_lanes:.1}"),
        format!("{}, {verdict}", bytes(largest)),
    ]
}

fn bytes(bytes: f64) -> String {
    match bytes {
        small if small < 1e9 => format!("{:.1} MB", small / 1e6),
        large => format!("{:.1} GB", large / 1e9),
    }
}

fn speed(speed: f64) -> String {
    format!("{}/s", bytes(speed))
}
