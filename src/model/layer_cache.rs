//! The KV cache of a layer, and what works on it: on the device, or in the memory of the host, where rows of
//! activations cross the link between both.
//!
//! Invariant: the results are the same, wherever the cache is.

use super::offload::{ChosenValues, RowLink};
use mainstem_kernels::{AttentionShape, Backend, KvLayer, KvTable};
use std::sync::Arc;

/// The KV cache of a layer.
pub struct LayerCache<Buf> {
    /// The page table of the layer.
    pub table: KvTable,
    pub kv: KvLayer<Buf>,
    /// The way of rows to the cache, if attention on it is computed in the memory of the host.
    pub row_link: Option<Arc<RowLink>>,
    /// The source of V that the cache lacks in the current step, if there is any.
    pub values: Option<ChosenValues<Buf>>,
}

impl<Buf: Send + Sync> LayerCache<Buf> {
    /// Returns a cache on whose pages the device itself computes.
    pub fn on_device(table: KvTable, kv: KvLayer<Buf>) -> LayerCache<Buf> {
        LayerCache { table, kv, row_link: None, values: None }
    }

    /// Stores k and v of the current rows, so many, at their positions in `table`: see [`Backend::store_kv`].
    pub fn store<B: Backend<Buf = Buf>>(
        &mut self,
        b: &mut B,
        rows: usize,
        table: KvTable,
        [k, v]: [&Buf; 2],
    ) {
        if let Some(link) = &self.row_link {
            let layout = &self.kv.layout;
            let width = layout.kv_heads * (layout.k_dim + layout.stored_v_dim());
            link.send(rows * width * b.activation_type().size());
        }
        b.store_kv(table, k, v, &mut self.kv);
    }

    /// Computes attention of q over the cache to `out`, for the current rows, so many: see
    /// [`Backend::attention`].
    pub fn attend<B: Backend<Buf = Buf>>(
        &self,
        b: &mut B,
        rows: usize,
        shape: &AttentionShape<Buf>,
        (q, out): (&Buf, &mut Buf),
    ) {
        let bytes = |width: usize| rows * shape.heads * width * b.activation_type().size();
        let [sent, received] = [self.kv.layout.k_dim, self.kv.layout.v_dim].map(bytes);
        self.row_link.iter().for_each(|link| link.send(sent));
        match &self.values {
            Some(values) => {
                values.serve(|source| b.attention_fetching_values(shape, q, (&self.kv, source), out));
            }
            None => b.attention(shape, q, &self.kv, out),
        }
        self.row_link.iter().for_each(|link| link.receive(received));
    }
}
