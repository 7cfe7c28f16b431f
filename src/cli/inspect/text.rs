//! Inspection as text: sections with a title and aligned columns, at most 110 characters wide unless names
//! are longer.
//!
//! Invariant: it has the contents of the JSON output, and computes nothing but sums. A row is one line, even
//! if a file name contains control characters.

use super::{
    DeviceMemory, ExpertPlaces, Inspection, OffloadedWeights, SpecificationValue, Speculation, Tensor,
    Tokenizer,
};
use crate::cli::escape::one_line;
use indicatif::{HumanBytes, HumanCount};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;

/// Formats an inspection with one line for tensors that are alike in all layers.
pub fn summary(inspection: &Inspection) -> String {
    render(inspection, grouped(&inspection.tensors))
}

/// Formats an inspection with a line for every tensor.
pub fn full(inspection: &Inspection) -> String {
    let row = |tensor: &Tensor| tensor_row(tensor, &tensor.name, 1, tensor.bytes);
    render(inspection, inspection.tensors.iter().map(row).collect())
}

type Row = Vec<String>;

fn render(inspection: &Inspection, tensors: Vec<Row>) -> String {
    let mut text = String::new();
    section(&mut text, &format!("model {}", inspection.name), &model(inspection));
    section(&mut text, "architecture", &architecture(inspection));
    let specification = &inspection.specification;
    let title =
        format!("specification {}, numbers from {}", specification.file, file_name(&specification.config));
    section(&mut text, &title, &specification.values.iter().map(specification_row).collect::<Vec<_>>());
    let bytes: usize = inspection.tensors.iter().map(|tensor| tensor.bytes).sum();
    let title = format!("tensors: {}, {} in total", inspection.tensors.len(), size(bytes));
    section(&mut text, &title, &tensors);
    let unused = inspection.unused.iter().map(|it| row([&it.name, &size(it.bytes), it.why]));
    section(&mut text, "unused tensors", &unused.collect::<Vec<_>>());
    let devices = inspection.partition.len();
    let title = format!("partition over {devices} {}", if devices == 1 { "device" } else { "devices" });
    section(&mut text, &title, &inspection.partition.iter().map(device_row).collect::<Vec<_>>());
    section(&mut text, &memory_title(inspection), &memory(inspection));
    text
}

/// Appends a title and its rows with aligned columns. Appends nothing if there are no rows.
fn section(text: &mut String, title: &str, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    let shown = |row: &Row| row.iter().map(|cell| one_line(cell).into_owned()).collect();
    let rows: Vec<Row> = rows.iter().map(shown).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell: &String| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let gap = if text.is_empty() { "" } else { "\n" };
    let _ = writeln!(text, "{gap}{}", one_line(title));
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        let _ = writeln!(text, "  {}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}

fn row<const N: usize>(cells: [&str; N]) -> Row {
    cells.map(str::to_owned).into()
}

fn model(inspection: &Inspection) -> Vec<Row> {
    let ids: Vec<String> = inspection.end_tokens.ids.iter().map(u32::to_string).collect();
    let end = match inspection.end_tokens.source {
        Some(source) => format!("{} ({source})", ids.join(", ")),
        None => "none".to_owned(),
    };
    let setting = |(key, value): (&String, &Value)| format!("{key} {value}");
    let sampling: Vec<String> = inspection.sampling.iter().map(setting).collect();
    let sampling = match sampling.is_empty() {
        true => "no recommended values".to_owned(),
        false => format!("{} (generation_config.json)", sampling.join(", ")),
    };
    let tokenizer = match &inspection.tokenizer {
        Tokenizer { error: Some(error), .. } => error.clone(),
        Tokenizer { source_tokens: Some(source), tokens: Some(target), .. } => {
            format!("{source} tokens of the input, {target} of the output")
        }
        _ => "found".to_owned(),
    };
    let mut rows = vec![row(["path", &inspection.path.display().to_string()])];
    let files = inspection.files.iter().map(|file| file_name(file));
    rows.extend(files.map(|name| row(["file", &name])));
    rows.extend([row(["end tokens", &end]), row(["sampling", &sampling])]);
    let defaults = inspection.prompting_defaults.iter().filter(|(_, value)| !value.is_null());
    let defaults: Vec<String> = defaults.map(|(key, value)| format!("{key} {}", plain_text(value))).collect();
    if !defaults.is_empty() {
        rows.push(row(["prompting", &defaults.join(", ")]));
    }
    rows.extend(inspection.unsupported_settings.iter().map(|it| row(["not supported", &setting(it)])));
    if !inspection.unread_keys.is_empty() {
        rows.push(row(["not read", &inspection.unread_keys.join(", ")]));
    }
    rows.push(row(["tokenizer", &tokenizer]));
    if let Some(Speculation { method, max_drafts, acceptance, draft }) = &inspection.speculation {
        let text = format!("{method}, up to {max_drafts} drafts per step, acceptance {acceptance}");
        rows.push(row(["speculation", &text]));
        let draft =
            draft.iter().map(|it| format!("{}: {}, context {}", it.name, size(it.weights), it.context));
        rows.extend(draft.map(|text| row(["draft model", &text])));
    }
    rows
}

fn architecture(inspection: &Inspection) -> Vec<Row> {
    let a = &inspection.architecture;
    let biased = |bias| if bias { ", with biases" } else { "" };
    let attention = format!(
        "query heads {}, KV heads {}, head dimension {}{}",
        a.heads,
        a.kv_heads,
        a.head_dim,
        biased(a.attention_bias)
    );
    let mlp = format!("{} {}, width {}{}", a.mlp, plain_text(&a.activation), a.mlp_width, biased(a.mlp_bias));
    let head = match a.tied_head {
        Some(true) => "tied to the embedding",
        Some(false) => "separate matrix",
        None => "none",
    };
    let layers = match a.encoder_layers {
        0 => a.layers.to_string(),
        before => format!("{before} of the encoder, {} of the decoder", a.layers),
    };
    let mut rows = vec![
        row(["family", a.model_type.as_ref().or(a.family.first()).map_or("unknown", String::as_str)]),
        row(["kind", &plain_text(&json!(a.kind)).replace('_', "-")]),
        row(["endpoints", &a.serves.join(", ")]),
        row(["parameters", &format!("{}, {:.2} bits each", HumanCount(a.parameters as u64), a.bits)]),
        row(["layers", &layers]),
        row(["hidden", &a.hidden.to_string()]),
        row(["attention", &attention]),
        row(["MLP", &mlp]),
    ];
    if a.experts > 0 {
        let experts = format!("{}, {} for each token", a.experts, a.experts_per_token);
        rows.push(row(["experts", &experts]));
    }
    rows.push(row(["norm", &format!("{}, epsilon {}", plain_text(&a.norm), plain_text(&a.norm_eps))]));
    rows.push(row(["positions", &positions(inspection)]));
    if !a.rope_scaling.is_null() {
        rows.push(row(["  scaling", &plain_text(&a.rope_scaling)]));
    }
    rows.push(row(["vocabulary", &a.vocab.to_string()]));
    rows.push(row(["context", &a.context.to_string()]));
    if a.encoder_context > 0 {
        rows.push(row(["encoder context", &format!("{} tokens", a.encoder_context)]));
    }
    rows.push(row(["head", head]));
    rows
}

fn positions(inspection: &Inspection) -> String {
    let a = &inspection.architecture;
    if a.rope_theta.is_null() {
        return if a.positions.is_null() { "none".to_owned() } else { plain_text(&a.positions) };
    }
    format!(
        "rotary, {} of {} dimensions, theta {}",
        plain_text(&a.rope_style),
        a.rope_dims,
        plain_text(&a.rope_theta)
    )
}

fn specification_row(value: &SpecificationValue) -> Row {
    let by = value.by.join(", ");
    let origin = match value.origin {
        "specification" => "written in the specification".to_owned(),
        "config" => format!("key {by}"),
        "default" => format!("the specification's default, since there is no key {by}"),
        "derived" | "formula" => format!("{}: {by}", value.origin),
        _ => "the format's default".to_owned(),
    };
    // The details of a compound value are in the architecture.
    let key = match value.layers.as_slice() {
        [] => value.key.clone(),
        layers => format!("{} ({})", value.key, layer_ranges(layers)),
    };
    row([&key, &plain_text(value.value.get("kind").unwrap_or(&value.value)), &origin])
}

/// Formats layer numbers, with ranges for consecutive ones and at most three ranges.
fn layer_ranges(layers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for layer in layers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *layer => *last = *layer,
            _ => runs.push((*layer, *layer)),
        }
    }
    const SHOWN: usize = 3;
    let shown = runs.iter().take(SHOWN).map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    let more = if runs.len() > SHOWN { " …" } else { "" };
    let word = if layers.len() == 1 { "layer" } else { "layers" };
    format!("{word} {}{more}", shown.collect::<Vec<_>>().join(", "))
}

/// Returns one row per name pattern and type, in the order of the tensors.
fn grouped(tensors: &[Tensor]) -> Vec<Row> {
    let mut groups: Vec<(&Tensor, usize, usize)> = Vec::new();
    for tensor in tensors {
        let alike = |(first, ..): &&mut (&Tensor, usize, usize)| {
            first.pattern == tensor.pattern && (&first.ty, &first.stored) == (&tensor.ty, &tensor.stored)
        };
        match groups.iter_mut().find(alike) {
            Some((_, count, bytes)) => (*count, *bytes) = (*count + 1, *bytes + tensor.bytes),
            None => groups.push((tensor, 1, tensor.bytes)),
        }
    }
    groups.into_iter().map(|(first, count, bytes)| tensor_row(first, &first.pattern, count, bytes)).collect()
}

fn tensor_row(tensor: &Tensor, name: &str, count: usize, bytes: usize) -> Row {
    let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
    let times = if count > 1 { format!("x {count}") } else { String::new() };
    let ty = match tensor.ty == tensor.stored {
        true => tensor.ty.clone(),
        false => format!("{} (stored {})", tensor.ty, tensor.stored),
    };
    row([name, tensor.role, &ty, &shape.join(" x "), &times, &size(bytes)])
}

/// Returns the row of one device: its layers and heads, as in Table 4 of Shi et al. 2024, and its bytes.
fn device_row(held: &DeviceMemory) -> Row {
    let of = format!("weights {}, KV {}", size(held.weights), size(held.kv));
    row([&held.assigned.device, &held.assigned.to_string(), &size(held.total), &of])
}

fn memory_title(inspection: &Inspection) -> String {
    let m = &inspection.memory;
    format!("memory on {}: {} slots, {} cache in pages of {}", m.device, m.slots, m.kv_type, m.page_size)
}

fn memory(inspection: &Inspection) -> Vec<Row> {
    let m = &inspection.memory;
    // A device that allocates no memory, such as the fake one, fits any cache.
    let less = m.total > 0 && m.kv < m.kv_for_slots;
    let verdict = match (m.total <= m.free, less) {
        (false, _) => "does not fit",
        (true, true) => "fits, with a smaller cache than all slots could use",
        (true, false) => "fits",
    };
    let longest = format!("fits sequences of {} tokens", m.longest_tokens);
    let mut rows = vec![row(["weights", &size(m.weights)])];
    rows.extend(m.offload.iter().flat_map(offload));
    rows.extend([
        row(["KV per token", &size(m.kv_per_token)]),
        row(["KV per sequence", &size(m.kv_per_sequence), &format!("of {} tokens", m.context_tokens)]),
        row(["KV for all slots", &size(m.kv_for_slots)]),
        row(["KV allocated", &size(m.kv), &longest]),
    ]);
    for (place, bytes) in [("  on disk", m.kv_on_disk), ("  on host", m.kv_on_host)] {
        if bytes > 0 {
            rows.push(row([place, &size(bytes), "read as far as sequences attend to it"]));
        }
    }
    rows.extend([
        row(["activations", &size(m.activations)]),
        row(["step buffers", &size(m.step_buffers)]),
        row(["total", &size(m.total), "weights, cache, activations and step buffers"]),
    ]);
    if let Some(bytes) = m.device_memory {
        rows.push(row(["device memory", &size(bytes as usize), "of each device"]));
    }
    rows.extend([row(["free now", &size(m.free), verdict])]);
    rows
}

/// Returns the rows about weights that do not all stay in memory.
fn offload(places: &OffloadedWeights) -> Vec<Row> {
    let stores = places.stores.iter().map(|store| {
        let state = if store.exists() { "" } else { "not written yet" };
        row(["  from", &store.display().to_string(), state])
    });
    let mut rows = vec![
        row(["  of layers", &size(places.resident), "stay in memory"]),
        row(["  buffers", &size(places.buffers), "for those that are read"]),
        row(["  read per step", &size(places.streamed)]),
    ];
    rows.extend((places.host > 0).then(|| row(["  on host", &size(places.host), "copied per step"])));
    if let Some(ExpertPlaces { experts, bytes, pool_experts, pool }) = &places.experts {
        let held = format!("for {pool_experts} of {experts} experts");
        rows.push(row(["  expert pool", &size(*pool), &held]));
        rows.push(row(["  experts", &size(*bytes), "read when rows choose them"]));
    }
    rows.into_iter().chain(stores).collect()
}

fn size(bytes: usize) -> String {
    HumanBytes(bytes as u64).to_string()
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Formats a value without JSON punctuation.
fn plain_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Object(entries) => {
            let kind = entries.get("kind").map(plain_text);
            let rest = entries.iter().filter(|(key, _)| *key != "kind");
            let rest = rest.map(|(key, value)| format!("{key} {}", plain_text(value)));
            kind.into_iter().chain(rest).collect::<Vec<_>>().join(", ")
        }
        Value::Number(number) if number.is_f64() => number.as_f64().unwrap_or(f64::NAN).to_string(),
        other => other.to_string(),
    }
}
