//! Tests of `quantize --calibrate`: the collected statistics match what the model computes, and the written
//! model uses them.

use crate::common::{fixture, mainstem};
use crate::families::family;
use crate::quantize::{Room, loaded, opened, target};
use mainstem::export::{OutputFormat, write_model};
use mainstem::model::executor::{Executor, KvCacheConfig, ModelExecutor};
use mainstem::model::spec::{LayerSpec, MlpSpec, NormSpec, TensorSlice};
use mainstem::model::{ModelRef, ModelSource, Shard, tensor_slices, tensors};
use mainstem::quantize::{Observations, Observed, RoundingPolicy};
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::{
    ActivationPrecision, Backend, Fraction, HandoffPorts, KvTable, QuantType, SamplingParams, Span,
    SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, StepLimits, StepOutput, TableUpdate,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const ROWS: usize = 32;

fn cpu() -> CpuBackend {
    let cpu = CpuBackend::new(CpuConfig {
        threads: 2,
        isa: Isa::Auto,
        activation_precision: ActivationPrecision::F32,
    });
    cpu.expect("there is a CPU")
}

/// Runs the model on some tokens in one step of a device and returns its output.
fn read(device: impl Backend, source: &ModelSource, tokens: &[u32], want: SpanOutput) -> StepOutput {
    let limits = StepLimits {
        slots: 1,
        rows: ROWS,
        batch_rows: usize::MAX,
        logit_rows: 8,
        positions: ROWS,
        encoder_positions: 0,
        page_positions: ROWS,
        window: None,
        top_logprobs: 0,
        vocab: source.spec.vocab,
        hidden: source.spec.hidden,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: Fraction::ONE,
    };
    let kv = KvCacheConfig { ty: QuantType::F32, pages: 2, window_pages: 0 };
    let whole = Shard::whole(&source.spec);
    let mut model = ModelExecutor::new(device, source, &whole, kv, limits).expect("there is room");
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    batch.tokens.extend(tokens);
    batch.table_updates.push(TableUpdate { slot: 0, table: KvTable::Own, index: 0, page: 1 });
    batch.spans.push(Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot: 0,
        start: 0,
        tokens: SpanTokens::Given { at: 0, len: tokens.len() as u32 },
        table: SpanTable::Own,
        reserved: ROWS as u32,
        encoder_len: 0,
        output: want,
    });
    if want == SpanOutput::All {
        batch.sampling.extend(tokens.iter().map(|_| SamplingParams::GREEDY));
    }
    model.run(&batch, HandoffPorts::default(), &mut out).expect("it runs");
    out
}

/// Runs the model on some tokens and returns the observed GEMM inputs.
fn observed(source: &ModelSource, tokens: &[u32]) -> Arc<Observations> {
    let seen = Arc::<Observations>::default();
    read(Observed::new(cpu(), seen.clone()), source, tokens, SpanOutput::All);
    seen
}

fn near(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (column, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= 1e-4 * want.abs().max(1e-6), "column {column}: {got} is not {want}");
    }
}

/// Returns the mean square of each column.
fn column_mean_squares(rows: &[Vec<f64>]) -> Vec<f64> {
    let mean = |column: usize| rows.iter().map(|row| row[column].powi(2)).sum::<f64>() / rows.len() as f64;
    (0..rows[0].len()).map(mean).collect()
}

fn numbers(source: &ModelSource, piece: &TensorSlice) -> Vec<f64> {
    let taken = tensor_slices::read_slice(&source.checkpoint, piece).expect("it is there");
    taken.to_f32().into_iter().map(f64::from).collect()
}

/// The input of the first layer is the normalized embedding, computed here; the input of the head is the
/// final hidden states. The head is tied to the embedding.
#[test]
fn the_first_matrices_and_the_head_are_multiplied_by_what_is_known() {
    let source = ModelSource::open(&ModelRef::Demo, None).expect("it is built in");
    let tokens: Vec<u32> = (0..20).map(|n| 5 + n * 13).collect();
    let seen = observed(&source, &tokens);
    let stack = source.spec.decoder.as_ref().expect("it is a decoder");
    let (layer, head) = (&stack.layers[0], stack.head.as_ref().expect("it has a head"));
    let embedding = &stack.embedding.as_ref().expect("it has one").table;
    let norm = layer.attention_norms.pre.as_ref().expect("it has one");
    let (table, width) = (numbers(&source, embedding), norm.width);
    let row = |token: &u32| &table[*token as usize * width..][..width];
    let rows: Vec<Vec<f64>> = tokens.iter().map(|token| rms_norm(&source, norm, row(token))).collect();
    for piece in [&layer.attention.q, &layer.attention.k, &layer.attention.v].map(|linear| &linear.weight) {
        near(&seen.mean_squares(&piece.matrix_id()).expect("it was seen"), &column_mean_squares(&rows));
    }
    assert_eq!(head.table.name, embedding.name);
    let out = read(cpu(), &source, &tokens, SpanOutput::Hidden);
    let states = out.hidden.chunks_exact(width).map(|row| row.iter().map(|x| f64::from(*x)).collect());
    near(
        &seen.mean_squares(&head.table.matrix_id()).expect("it was seen"),
        &column_mean_squares(&states.collect::<Vec<_>>()),
    );
}

/// Computes w x, for w of shape (n, len(x)).
fn matrix_vector(source: &ModelSource, w: &TensorSlice, x: &[f64]) -> Vec<f64> {
    let rows = numbers(source, w);
    rows.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

/// Applies Llama's RMS norm to x.
fn rms_norm(source: &ModelSource, norm: &NormSpec, x: &[f64]) -> Vec<f64> {
    let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (square + f64::from(norm.eps)).sqrt();
    x.iter().zip(numbers(source, &norm.weights[0])).map(|(x, weight)| x * scale * weight).collect()
}

/// A single token attends only to itself: the input of `o` is its values, repeated for each head that shares
/// them. The input of `down` follows from that.
#[test]
fn what_lies_behind_attention_and_activation_is_what_a_token_makes_of_itself() {
    let source = ModelSource::open(&ModelRef::Demo, None).expect("it is built in");
    let token = 77;
    let seen = observed(&source, &[token]);
    let stack = source.spec.decoder.as_ref().expect("it is a decoder");
    let LayerSpec { attention, attention_norms, mlp, mlp_norms, .. } = &stack.layers[0];
    let MlpSpec::Dense(mlp) = mlp else { panic!("the demo model is dense") };
    let (table, width) =
        (numbers(&source, &stack.embedding.as_ref().expect("it has one").table), attention.q.k);
    let x = &table[token as usize * width..][..width];
    let read = rms_norm(&source, attention_norms.pre.as_ref().expect("it has one"), x);
    let values = matrix_vector(&source, &attention.v.weight, &read);
    let shared = attention.heads / attention.kv_heads;
    assert!(shared > 1, "heads share values");
    let heads: Vec<f64> =
        values.chunks_exact(attention.v_dim).flat_map(|value| value.repeat(shared)).collect();
    let o = matrix_vector(&source, &attention.o.weight, &heads);
    let x: Vec<f64> = x.iter().zip(o).map(|(x, o)| x + o).collect();
    let read = rms_norm(&source, mlp_norms.pre.as_ref().expect("it has one"), &x);
    let gate = matrix_vector(&source, &mlp.gate.weight, &read);
    let up = matrix_vector(&source, &mlp.up.as_ref().expect("it has one").weight, &read);
    let activated: Vec<f64> = gate.iter().zip(up).map(|(x, up)| x / (1.0 + (-x).exp()) * up).collect();
    for (linear, inputs) in [(&attention.o, heads), (&mlp.down, activated)] {
        let got = seen.mean_squares(&linear.weight.matrix_id()).expect("it was seen");
        let want: Vec<f64> = inputs.iter().map(|x| x * x).collect();
        // Values with cancellation are compared relative to the largest.
        let close = 1e-4 * want.iter().copied().fold(0.0, f64::max);
        assert_eq!(got.len(), want.len(), "{}", linear.weight.name);
        for (column, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!(
                (got - want).abs() <= close,
                "{} column {column}: {got} is not {want}",
                linear.weight.name
            );
        }
    }
}

/// Fused, transposed and stacked matrices and separate tables have a statistic for each column, except behind
/// the router. A model written with them loads to the same bytes as with rules.
#[test]
fn every_kind_of_matrix_is_seen_and_written_as_it_is_loaded() {
    let names =
        ["gpt2", "phi3", "bloom", "opt_350m", "gemma2", "mixtral", "qwen2_moe", "dots1", "falcon_40b"];
    for name in names {
        let (model, room) = (family(name, "calibrate"), Room::new("calibrate"));
        let source = opened(&model.0, "");
        let tokens: Vec<u32> = (0..24).map(|n| 1 + n * 7 % 90).collect();
        let seen = observed(&source, &tokens);
        let stack = source.spec.decoder.as_ref().expect("it is a decoder");
        let mut experts = 0;
        for layer in &stack.layers {
            let attention = &layer.attention;
            let linears = [&attention.q, &attention.k, &attention.v, &attention.o].into_iter();
            let dense = match &layer.mlp {
                MlpSpec::Dense(dense) => Some(&**dense),
                MlpSpec::Experts(moe) => {
                    experts += moe
                        .experts
                        .iter()
                        .filter(|e| seen.mean_squares(&e.gate.weight.matrix_id()).is_some())
                        .count();
                    let behind = moe
                        .experts
                        .iter()
                        .find_map(|expert| seen.mean_squares(&expert.down.weight.matrix_id()));
                    assert!(behind.is_none(), "{name}: there is no seam to see it at");
                    moe.shared.as_ref()
                }
            };
            let dense = dense.into_iter().flat_map(|d| [Some(&d.gate), d.up.as_ref(), Some(&d.down)]);
            for linear in linears.chain(dense.flatten()) {
                let columns = seen.mean_squares(&linear.weight.matrix_id()).map(|means| means.len());
                assert_eq!(columns, Some(linear.k), "{name}: {}", linear.weight.name);
            }
        }
        let is_mixture = |layer: &&LayerSpec| matches!(layer.mlp, MlpSpec::Experts(_));
        let mixtures = stack.layers.iter().filter(is_mixture).count();
        assert!(experts >= 2 * mixtures, "{name}: {experts} experts of {mixtures} mixtures were seen");
        let importance = Arc::new(seen.importance_matrix().expect("they are numbers"));
        let by_equations = loaded(&opened(&model.0, "*=q4,f16"));
        let fitted = RoundingPolicy::LeastSquares(Some(importance));
        // Formats that store each value separately are written too, but have no quants to choose.
        let mut halved = opened(&model.0, "*=bf16");
        halved.rounding = fitted.clone();
        let out = room.place("halved");
        write_model(&halved, &target(out.clone(), OutputFormat::Safetensors)).expect("it is written");
        assert!(loaded(&opened(&out, "")) == loaded(&opened(&model.0, "*=bf16")), "{name}");
        for choice in [RoundingPolicy::LeastSquares(None), fitted] {
            let mut source = opened(&model.0, "*=q4,f16");
            source.rounding = choice;
            let out = room.place("out");
            write_model(&source, &target(out.clone(), OutputFormat::Safetensors)).expect("it is written");
            let written = loaded(&opened(&out, ""));
            assert!(loaded(&source) == written, "{name}");
            let coded = tensors::required_slices(&source.spec).len();
            assert!(coded > 0 && written != by_equations, "{name}: codes are as ever");
            std::fs::remove_dir_all(out).expect("it is there");
        }
    }
}

fn run(room: &Room, line: &[&str]) -> (Option<i32>, String) {
    let mut command = mainstem();
    let output = command.arg("quantize").args(line).current_dir(&room.0).output().expect("it starts");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the path is text")
}

/// Writes the beginning of the held-out text to a file. Returns it with the file of the whole text.
fn texts(room: &Room) -> [PathBuf; 2] {
    let whole = fixture("perplexity/held_out.txt");
    let (content, part) = (std::fs::read_to_string(&whole).expect("it is recorded"), room.place("part.txt"));
    std::fs::write(&part, &content[..4000]).expect("it can be written");
    [part, whole]
}

/// The first chunk is the same for both texts; the second differs.
#[test]
fn as_many_chunks_are_read_as_are_requested() {
    let room = Room::new("calibrate-chunks");
    let [part, whole] = texts(&room);
    let mut written = Vec::new();
    for (name, text_file, chunks) in [("a", &part, "1"), ("b", &whole, "1"), ("c", &whole, "2")] {
        let line = ["demo", name, "--weights", "*=q4_b64t1", "--calibrate", text(text_file)];
        let (code, errors) = run(&room, &[&line[..], &["--calibrate-chunks", chunks]].concat());
        assert_eq!((code, errors.as_str()), (Some(0), ""), "{name}");
        written.push(loaded(&opened(&room.place(name), "")));
    }
    assert!(written[0] == written[1], "one chunk is the same of both");
    assert!(written[1] != written[2], "the second one counts");
    assert!(
        run(&room, &["demo", "d", "--weights", "*=q4_b64t1", "--rounding", "least-squares"]).0 == Some(0)
    );
    assert!(loaded(&opened(&room.place("d"), "")) != written[0], "a text counts");
}

#[test]
fn what_cannot_calibrate_is_refused_and_nothing_is_left() {
    let room = Room::new("calibrate-refused");
    let file = |name: &str, content: &[u8]| {
        std::fs::write(room.place(name), content).expect("it can be written");
        name.to_owned()
    };
    let (empty, short) = (file("empty.txt", b""), file("short.txt", b"Once upon a time."));
    let bytes = file("bytes.txt", b"ab\xffcd");
    let (encoder, both) = (family("bert", "calibrate"), family("t5", "calibrate"));
    let untold = fixture("families/mistral");
    let held_out = fixture("perplexity/held_out.txt");
    let (whole, demo) = (text(&held_out), "demo");
    std::fs::create_dir(room.place("there")).expect("a folder");
    let names = room.names();
    for (model, out, line, code, message) in [
        (demo, "out", &["--calibrate", &empty][..], 1, "empty.txt with mainstem-demo: fewer than two tokens"),
        (demo, "out", &["--calibrate", &short], 1, "calibration requires at least 512"),
        (demo, "out", &["--calibrate", &bytes], 1, "bytes.txt: not UTF-8 from byte 2 on"),
        (demo, "out", &["--calibrate", "none.txt"], 1, "none.txt"),
        (demo, "there", &["--calibrate", whole], 1, "there already exists"),
        (demo, "out", &["--calibrate", whole, "--rounding", "nearest"], 2, "--rounding least-squares"),
        (demo, "out", &["--calibrate", whole, "--codes", "equations"], 2, "--rounding least-squares"),
        (demo, "out", &["--calibrate", whole, "--calibrate-chunks", "0"], 2, "--calibrate-chunks"),
        (demo, "out", &["--calibrate-chunks", "3"], 2, "--calibrate"),
        (
            text(&encoder.0),
            "out",
            &["--calibrate", whole],
            1,
            "is an encoder-only model, but calibration supports generative decoder-only models",
        ),
        (text(&both.0), "out", &["--calibrate", whole], 1, "is an encoder-decoder"),
        (text(&untold), "out", &["--calibrate", whole], 1, "tokenizer"),
    ] {
        let (found, errors) = run(&room, &[&[model, out, "--weights", "*=q8"], line].concat());
        assert!(errors.contains(message), "{line:?}: {errors}");
        assert_eq!(found, Some(code), "{line:?}: {errors}");
        assert_eq!(room.names(), names, "{line:?}");
    }
}

/// A type that cannot be written is refused before the calibration text is read.
#[test]
fn a_type_that_gguf_has_not_is_refused_before_the_text_is_read() {
    let room = Room::new("calibrate-gguf");
    let model = fixture("gguf/f16.gguf");
    let line = [text(&model), "out.gguf", "--weights", "*=q4_b32t1a", "--calibrate", "none.txt"];
    let (code, errors) = run(&room, &line);
    assert_eq!(code, Some(1), "{errors}");
    assert!(errors.contains("q4_b32t1a") && !errors.contains("none.txt"), "{errors}");
    assert!(room.names().is_empty());
}
