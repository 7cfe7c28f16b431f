//! Buffers for the intermediate results of a layer.
//!
//! Invariant: allocated once, for the largest row batch and the widest layer of both stacks. Only the
//! residual stream, with the angles of its positions, exists for all rows of a step.

use super::load_target::LoadTarget;
use super::spec::latent::LatentSpec;
use super::spec::{AttentionSpec, MlpSpec, ModelSpec};
use mainstem_kernels::{DeviceError, KvLayer, KvLayout, QuantType, SpanStack, StepBatch, StepLimits};

/// Activation buffers of shape (rows, width), in the backend's activation type, for the rows of a batch.
pub struct Activations<Buf> {
    /// The residual stream of the current rows, (rows, hidden).
    pub x: Buf,
    /// The normalized residual stream and the output of a sub-layer, (rows, hidden).
    pub h: Buf,
    pub y: Buf,
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
    pub latent: LatentActivations<Buf>,
    /// Products of queries and of keys with the vectors of distances, (rows, heads, buckets) each.
    pub distances: [Buf; 2],
    /// The inner layers of the MLP, (rows, MLP width).
    pub gate: Buf,
    pub up: Buf,
    /// Router logits, (rows, experts), and the output of the shared expert, (rows, hidden).
    pub router: Buf,
    pub shared: Buf,
    /// Cosines and sines of the step's positions, (rows, dims / 2, 2), F32, for each kind of rotary position
    /// embedding.
    pub angles: Vec<Buf>,
    /// The residual streams of the row batches of each stack that are not the current rows. Those of the
    /// encoder remain there for the cross-attention of the decoder layers.
    streams: [Vec<ResidualStream<Buf>>; 2],
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

/// Buffers of latent attention besides queries, keys and values.
pub struct LatentActivations<Buf> {
    /// The latent of queries.
    pub q_a: Buf,
    /// The parts of queries without positions, and later the values of heads, (rows, heads, width).
    pub heads: Buf,
    /// The rotated parts of queries, (rows, heads, rope_dim), and of the key, (rows, rope_dim).
    pub q_rope: Buf,
    pub k_rope: Buf,
    /// Keys and values of all heads, if openings attend to these: the scratch cache, for one row batch of one
    /// layer.
    pub opened: Option<KvLayer<Buf>>,
    /// Number of decoder rows of the step before those of openings.
    pub rows_before_openings: usize,
    /// Whether the step has openings that attend to keys and values of all heads.
    pub has_openings: bool,
    /// Whether the current rows are those of openings.
    pub is_open: bool,
}

/// The residual stream of a row batch, and the angles of its positions.
struct ResidualStream<Buf> {
    x: Buf,
    angles: Vec<Buf>,
}

impl<Buf> Activations<Buf> {
    /// Allocates buffers for every step within `limits`, of a model whose layers `ranks` devices share.
    pub fn new<T: LoadTarget<Buf = Buf>>(
        target: &mut T,
        (spec, ranks): (&ModelSpec, usize),
        limits: &StepLimits,
    ) -> Result<Activations<Buf>, DeviceError> {
        let w = Widths::for_spec(spec);
        let has_cross = spec.stacks().flat_map(|stack| &stack.layers).any(|layer| layer.cross.is_some());
        let batches = [
            (SpanStack::Encoder, limits.encoder_batches(), spec.encoder.is_some() || has_cross),
            (SpanStack::Decoder, limits.decoder_batches(), spec.decoder.is_some()),
        ];
        let mut streams = [Vec::new(), Vec::new()];
        for (stack, batches, _) in batches.into_iter().filter(|(.., is_used)| *is_used) {
            for batch in 0..batches {
                streams[stack as usize].push(w.alloc_stream(target, limits, (stack, batch))?);
            }
        }
        let opened = opened_layout(spec, limits).map(|layout| target.alloc_kv(layout)).transpose()?;
        // Taken from the streams.
        let angles = w.angles.iter().map(|_| target.alloc(0)).collect::<Result<_, _>>()?;
        let (rows, size) = (limits.rows_at_once(), target.activation_type().size());
        let mut alloc = |rows: usize, width: usize| target.alloc(rows * width * size);
        Ok(Activations {
            x: alloc(0, 0)?,
            h: alloc(rows, w.hidden)?,
            y: alloc(rows, w.stream)?,
            q: alloc(rows, w.q)?,
            k: alloc(rows, w.k)?,
            v: alloc(rows, w.v)?,
            gathered: alloc(rows, w.gathered)?,
            a: alloc(rows, w.a)?,
            latent: LatentActivations {
                q_a: alloc(rows, w.latent[0])?,
                heads: alloc(rows, w.latent[1])?,
                q_rope: alloc(rows, w.latent[2])?,
                k_rope: alloc(rows, w.latent[3])?,
                opened,
                rows_before_openings: usize::MAX,
                has_openings: false,
                is_open: false,
            },
            distances: [alloc(rows, w.distances)?, alloc(rows, w.distances)?],
            gate: alloc(rows, w.mlp)?,
            up: alloc(rows, w.mlp)?,
            router: alloc(rows, w.router)?,
            shared: alloc(rows, w.shared)?,
            angles,
            streams,
            selected: alloc(limits.logit_rows, w.stream)?,
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

impl<Buf> Activations<Buf> {
    /// Begins a step of the model itself, not of a draft model.
    pub fn begin(&mut self, batch: &StepBatch, limits: &StepLimits) {
        if self.latent.opened.is_some() {
            self.latent.rows_before_openings = batch.rows_before_openings(limits);
            self.latent.has_openings = batch.spans.iter().any(|span| span.is_opening(limits));
        }
    }

    /// Exchanges the residual stream of the current rows, with its angles, for that of a row batch. A second
    /// call undoes this.
    pub fn exchange(&mut self, stack: SpanStack, batch: usize) {
        let stream = &mut self.streams[stack as usize][batch];
        std::mem::swap(&mut self.x, &mut stream.x);
        std::mem::swap(&mut self.angles, &mut stream.angles);
    }
}

/// Returns the layout of the cache of openings, if they attend to keys and values of all heads. It is F32,
/// because its contents are temporary.
fn opened_layout(spec: &ModelSpec, limits: &StepLimits) -> Option<KvLayout> {
    let AttentionSpec { heads, latent, .. } = &spec.cached_layers().first()?.attention;
    let [kv_heads, k_dim, v_dim] = latent.as_ref()?.opening_heads(*heads)?;
    let page_positions = limits.page_positions;
    let pages = limits.scratch_positions().div_ceil(page_positions);
    Some(KvLayout { ty: QuantType::F32, pages, page_positions, kv_heads, k_dim, v_dim, v_in_k: false })
}

/// Widths of the buffers: the maximum over all layers.
struct Widths {
    hidden: usize,
    /// Width of the residual stream, or of an embedding that is wider.
    stream: usize,
    q: usize,
    k: usize,
    v: usize,
    /// Zero if no norm spans several ranks.
    gathered: usize,
    a: usize,
    /// Widths of [`LatentActivations`], in order.
    latent: [usize; 4],
    /// Zero without disentangled attention.
    distances: usize,
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
    /// Allocates the residual stream of a row batch of a stack.
    fn alloc_stream<T: LoadTarget>(
        &self,
        target: &mut T,
        limits: &StepLimits,
        (stack, batch): (SpanStack, usize),
    ) -> Result<ResidualStream<T::Buf>, DeviceError> {
        let rows = match stack {
            SpanStack::Encoder => limits.rows_at_once(),
            SpanStack::Decoder => limits.rows_of_decoder_batch(batch),
        };
        let x = target.alloc(rows * self.hidden * target.activation_type().size())?;
        let angles = self.angles.iter().map(|width| target.alloc(rows * width * size_of::<f32>()));
        Ok(ResidualStream { x, angles: angles.collect::<Result<_, _>>()? })
    }

    fn for_spec(spec: &ModelSpec) -> Widths {
        let layers = || spec.stacks().flat_map(|stack| &stack.layers);
        let attentions = || {
            layers()
                .flat_map(|layer| [&layer.attention].into_iter().chain(layer.cross.as_ref().map(|c| &c.1)))
        };
        let widest = |width: fn(&AttentionSpec) -> usize| attentions().map(width).max().unwrap_or(0);
        let latent = |width: fn(&LatentSpec, usize) -> usize| {
            let all = attentions().filter_map(|own| Some(width(own.latent.as_ref()?, own.heads)));
            all.max().unwrap_or(0)
        };
        let opened = |width: fn([usize; 3]) -> usize| {
            let shapes = attentions().filter_map(|own| own.latent.as_ref()?.opening_heads(own.heads));
            shapes.map(width).max().unwrap_or(0)
        };
        let of_keys = opened(|[heads, k_dim, _]| heads * k_dim);
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
            q: widest(AttentionSpec::q_width).max(of_keys),
            k: widest(AttentionSpec::k_width).max(of_keys),
            v: widest(AttentionSpec::v_width),
            gathered: widest(AttentionSpec::gathered_qk_width),
            a: widest(AttentionSpec::out_width).max(opened(|[heads, _, v_dim]| heads * v_dim)),
            latent: [
                latent(|it, _| it.q_a.as_ref().map_or(0, |(linear, _)| linear.n)),
                latent(|it, heads| heads * it.nope_dim.max(it.value_dim)),
                latent(|it, heads| heads * it.rope_dim),
                latent(|it, _| it.rope_dim),
            ],
            distances: widest(AttentionSpec::distances_width),
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
