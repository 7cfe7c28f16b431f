//! Buffers for the intermediate results of a layer.
//!
//! Invariant: allocated once, for the largest step and the widest layer of both stacks.

use super::load_target::LoadTarget;
use super::spec::{AttentionSpec, MlpSpec, ModelSpec};
use mainstem_kernels::{DeviceError, StepLimits};

/// Activation buffers of shape (rows, width), in the backend's activation type.
pub struct Activations<Buf> {
    /// The residual stream, (rows, hidden).
    pub x: Buf,
    /// The normalized residual stream and the output of a sub-layer, (rows, hidden).
    pub h: Buf,
    pub y: Buf,
    /// The encoder output, (rows, hidden), from which the decoder layers compute the K and V of their
    /// cross-attention.
    pub encoder_output: Buf,
    /// Queries, (rows, heads, k_dim).
    pub q: Buf,
    /// Keys, (rows, kv_heads, k_dim).
    pub k: Buf,
    /// Values, (rows, kv_heads, v_dim).
    pub v: Buf,
    /// Queries or keys gathered from all ranks of the stage, (rows, width), where a norm spans all heads.
    pub gathered: Buf,
    /// The attention output, (rows, heads, v_dim).
    pub a: Buf,
    /// The inner layers of the MLP, (rows, MLP width).
    pub gate: Buf,
    pub up: Buf,
    /// Router logits, (rows, experts), and the output of the shared expert, (rows, hidden).
    pub router: Buf,
    pub shared: Buf,
    /// Cosines and sines of the step's positions, (rows, dims / 2, 2), F32, for each kind of rotary position
    /// embedding.
    pub angles: Vec<Buf>,
    /// The rows whose logits are computed, (logit rows, hidden).
    pub selected: Buf,
    pub selected_h: Buf,
    /// Logits, (logit rows, vocabulary).
    pub logits: Buf,
    /// Logits of this rank's share of the vocabulary, if the head is split.
    pub local_logits: Buf,
    /// Number of rows whose logits fit into the buffers at once.
    pub logit_rows: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Bytes of a row of the residual stream.
    pub row_bytes: usize,
    /// Number of ranks that share the layers, over which sub-layer outputs are reduced. A whole model on a
    /// device that shares another one has one rank.
    pub ranks: usize,
}

impl<Buf> Activations<Buf> {
    /// Allocates buffers for every step within `limits`, of a model whose layers `ranks` devices share.
    pub fn new<T: LoadTarget<Buf = Buf>>(
        target: &mut T,
        (spec, ranks): (&ModelSpec, usize),
        limits: &StepLimits,
    ) -> Result<Activations<Buf>, DeviceError> {
        let w = Widths::for_spec(spec);
        let angles = w.angles.iter().map(|width| target.alloc(limits.rows * width * size_of::<f32>()));
        let angles = angles.collect::<Result<_, _>>()?;
        let size = target.activation_type().size();
        let mut alloc = |rows: usize, width: usize| target.alloc(rows * width * size);
        Ok(Activations {
            x: alloc(limits.rows, w.hidden)?,
            h: alloc(limits.rows, w.hidden)?,
            y: alloc(limits.rows, w.stream)?,
            encoder_output: alloc(limits.rows, w.encoder_output)?,
            q: alloc(limits.rows, w.q)?,
            k: alloc(limits.rows, w.k)?,
            v: alloc(limits.rows, w.v)?,
            gathered: alloc(limits.rows, w.gathered)?,
            a: alloc(limits.rows, w.a)?,
            gate: alloc(limits.rows, w.mlp)?,
            up: alloc(limits.rows, w.mlp)?,
            router: alloc(limits.rows, w.router)?,
            shared: alloc(limits.rows, w.shared)?,
            angles,
            selected: alloc(limits.logit_rows, w.hidden)?,
            selected_h: alloc(limits.logit_rows, w.stream)?,
            logits: alloc(limits.logit_rows, w.vocab)?,
            local_logits: alloc(limits.logit_rows, w.local_vocab)?,
            logit_rows: limits.logit_rows,
            hidden: w.hidden,
            row_bytes: w.hidden * size,
            ranks,
        })
    }
}

/// Widths of the buffers: the maximum over all layers.
struct Widths {
    hidden: usize,
    /// Width of the residual stream, or of an embedding that is wider.
    stream: usize,
    /// Zero without cross-attention.
    encoder_output: usize,
    q: usize,
    k: usize,
    v: usize,
    /// Zero if no norm spans several ranks.
    gathered: usize,
    a: usize,
    mlp: usize,
    router: usize,
    shared: usize,
    angles: Vec<usize>,
    /// Zero without a head.
    vocab: usize,
    /// Zero if the head is not split.
    local_vocab: usize,
}

impl Widths {
    fn for_spec(spec: &ModelSpec) -> Widths {
        let layers = || spec.stacks().flat_map(|stack| &stack.layers);
        let attentions = || {
            layers()
                .flat_map(|layer| [&layer.attention].into_iter().chain(layer.cross.as_ref().map(|c| &c.1)))
        };
        let widest = |width: fn(&AttentionSpec) -> usize| attentions().map(width).max().unwrap_or(0);
        let moes = || {
            layers().filter_map(|layer| match &layer.mlp {
                MlpSpec::Experts(moe) => Some(moe),
                MlpSpec::Dense(_) => None,
            })
        };
        let embeddings = spec.stacks().filter_map(|stack| stack.embedding.as_ref());
        let embedding = embeddings.map(|embedding| embedding.table.shape[1]).max().unwrap_or(0);
        let head = spec.last_stack().head.as_ref();
        // The head's input may be as wide as an embedding that is on another stage.
        let head_input = head.map_or(0, |head| head.table.shape[1]);
        let kinds = spec.stacks().map(|stack| stack.ropes.len()).max().unwrap_or(0);
        let dims =
            |kind: usize| spec.stacks().filter_map(move |stack| stack.ropes.get(kind)).map(|rope| rope.dims);
        Widths {
            hidden: spec.hidden,
            stream: spec.hidden.max(embedding).max(head_input),
            encoder_output: if layers().any(|layer| layer.cross.is_some()) { spec.hidden } else { 0 },
            q: widest(AttentionSpec::q_width),
            k: widest(AttentionSpec::k_width),
            v: widest(AttentionSpec::v_width),
            gathered: widest(AttentionSpec::gathered_qk_width),
            a: widest(AttentionSpec::out_width),
            mlp: layers().map(|layer| layer.mlp.width()).max().unwrap_or(0),
            router: moes().map(|moe| moe.router.n).max().unwrap_or(0),
            shared: if moes().any(|moe| moe.shared.is_some()) { spec.hidden } else { 0 },
            angles: (0..kinds).map(|kind| dims(kind).max().unwrap_or(0)).collect(),
            vocab: head.map_or(0, |_| spec.vocab),
            local_vocab: head
                .and_then(|head| head.vocab_split.as_ref())
                .map_or(0, |spread| spread.local.len()),
        }
    }
}
