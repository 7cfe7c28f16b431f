//! The context of resolving a stack, and the parts that all of its layers use: tensors, linear layers, norms
//! and activations.
//!
//! Invariant: the name of a slice is one that the checkpoint has, if it has any of the possible ones.

use super::lookup::Lookups;
use super::setting::OneOrMore;
use super::tables::{SizeTable, Tables};
use super::words::{ActivationName, MaskName, NormName, Placement, StackName};
use super::{LinearSpec, NormSpec, SliceBounds, TensorPart, TensorSlice};
use crate::tensor_names::{bias_name, tensor_name};
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::{Activation, Mask, NormKind};

/// Prefixes by which the names of tensors in files differ from those of a specification.
#[derive(Clone, Copy)]
pub(super) struct Prefixes<'a> {
    /// Prefixes that names may have in addition.
    pub added: &'a [String],
    /// Prefixes that names may lack.
    pub optional: &'a [String],
}

/// Context for resolving the parts of a stack.
pub(super) struct ResolveContext<'a, 'b> {
    pub lookups: &'a mut Lookups<'b>,
    pub tables: &'a Tables,
    pub prefixes: Prefixes<'a>,
    pub stack: StackName,
    /// Whether the stack is a decoder that attends to an encoder's output.
    pub has_encoder: bool,
    pub vocab: usize,
    pub hidden: usize,
    pub grouping: LayerGrouping,
}

/// The division of a stack's layers into groups with the same weights.
#[derive(Clone, Copy)]
pub(super) struct LayerGrouping {
    pub layers: usize,
    pub groups: usize,
    /// Layers of a group with weights of their own.
    pub own: usize,
}

impl LayerGrouping {
    /// Resolves the division of `layers` layers.
    pub fn resolve(lookups: &mut Lookups, table: &SizeTable, layers: usize) -> Result<LayerGrouping> {
        let groups = lookups.or_default("size.layer_groups", &table.layer_groups, 1)?;
        let own = lookups.or_default("size.group_layers", &table.group_layers, 1)?;
        ensure!(
            own > 0 && layers.is_multiple_of(own) && (1..=layers / own).contains(&groups),
            "{layers} layers cannot be divided into {groups} groups (size.layer_groups) of {own} layers with \
             their own weights (size.group_layers)"
        );
        Ok(LayerGrouping { layers, groups, own })
    }

    /// Returns a name pattern with the numbers of the layer's group, and of the layer in it.
    fn filled(&self, pattern: &str, layer: Option<usize>) -> String {
        let Some(layer) = layer else { return pattern.to_owned() };
        let turns = self.layers / self.own;
        // Divided as the models' own code does, which rounds.
        let group = ((layer / self.own) as f64 / (turns as f64 / self.groups as f64)) as usize;
        pattern.replace("{g}", &group.to_string()).replace("{j}", &(layer % self.own).to_string())
    }
}

impl ResolveContext<'_, '_> {
    /// Returns the mask of the layer.
    pub fn mask(&mut self) -> Result<Mask> {
        let table = &self.tables.attention;
        let usual = match self.stack {
            StackName::Encoder => MaskName::Bidirectional,
            StackName::Decoder => MaskName::Causal,
        };
        let mask = self.lookups.or_default("attention.mask", &table.mask, usual)?;
        let window = self.lookups.or_default("attention.window", &table.window, 0)?;
        let window = (window > 0).then_some(window);
        let chunk = self.lookups.or_default("attention.chunk", &table.chunk, 0)?;
        ensure!(
            chunk == 0 || window.is_none() && mask == MaskName::Causal,
            "'attention.chunk' needs a causal mask without a window"
        );
        Ok(match mask {
            MaskName::Causal if chunk > 0 => Mask::Chunked { chunk },
            MaskName::Causal => Mask::Causal { window },
            MaskName::Bidirectional if self.stack == StackName::Decoder => {
                bail!("a decoder cannot be bidirectional: later positions do not exist yet")
            }
            MaskName::Bidirectional => Mask::Bidirectional { window },
        })
    }

    /// Returns the slice of a tensor, under the first of its names that the checkpoint has.
    pub fn slice(
        &self,
        role: &'static str,
        names: &Option<OneOrMore<String>>,
        shape: Vec<usize>,
        part: TensorPart,
        expert: Option<usize>,
    ) -> Result<TensorSlice> {
        let names = names
            .as_ref()
            .with_context(|| format!("the specification has no tensor name for 'tensors.{role}'"))?;
        let layer = self.lookups.layer;
        let named = |pattern: &str| tensor_name(&self.grouping.filled(pattern, layer), layer, expert);
        let first = || names.as_slice().first().cloned();
        let found = candidate_names(names, self.prefixes)
            .into_iter()
            .find(|pattern| (self.lookups.has_tensor)(&named(pattern)))
            .or_else(first);
        let pattern =
            found.with_context(|| format!("the specification has no tensor name for 'tensors.{role}'"))?;
        // One tensor contains the matrices of all experts.
        let plane = expert.filter(|_| !pattern.contains("{e}"));
        let layer = layer.filter(|_| pattern.contains("{i}"));
        Ok(TensorSlice {
            role,
            name: named(&pattern),
            pattern: pattern.into(),
            layer,
            shape,
            plane,
            part,
            bounds: SliceBounds::default(),
            transposed: false,
        })
    }

    /// Returns whether the files have the tensor of the current layer.
    pub fn exists(&self, names: &Option<OneOrMore<String>>) -> bool {
        let patterns = names.iter().flat_map(|names| candidate_names(names, self.prefixes));
        let layer = self.lookups.layer;
        let mut named =
            patterns.map(|pattern| tensor_name(&self.grouping.filled(&pattern, layer), layer, None));
        named.any(|name| (self.lookups.has_tensor)(&name))
    }

    /// Returns the bias vector that belongs to a weight, named after it.
    pub fn bias_of(&self, weight: &TensorSlice, role: &'static str, shape: Vec<usize>) -> TensorSlice {
        // Names without a suffix may be continued in either way.
        let appended = |name: &str| format!("{name}_bias");
        let is_bare = bias_name(&weight.name) == format!("{}.bias", weight.name);
        let is_appended = is_bare && (self.lookups.has_tensor)(&appended(&weight.name));
        let named = |name: &str| if is_appended { appended(name) } else { bias_name(name) };
        TensorSlice {
            role,
            name: named(&weight.name),
            pattern: named(&weight.pattern).into(),
            shape,
            transposed: false,
            ..weight.clone()
        }
    }

    /// Resolves a linear layer that is stored as a tensor of its own.
    pub fn linear(
        &mut self,
        role: &'static str,
        bias_role: Option<&'static str>,
        names: &Option<OneOrMore<String>>,
        n: usize,
        k: usize,
    ) -> Result<LinearSpec> {
        self.linear_part(role, bias_role, names, (n, k), (n, TensorPart::Whole), None)
    }

    /// Resolves a linear layer that is a part of a tensor with `rows` rows.
    pub fn linear_part(
        &mut self,
        role: &'static str,
        bias_role: Option<&'static str>,
        names: &Option<OneOrMore<String>>,
        (n, k): (usize, usize),
        (rows, part): (usize, TensorPart),
        expert: Option<usize>,
    ) -> Result<LinearSpec> {
        let transposed = self.transposed(expert.is_some())?;
        let shape = if transposed { vec![k, rows] } else { vec![rows, k] };
        let mut weight = TensorSlice { transposed, ..self.slice(role, names, shape, part, expert)? };
        let mut bias = bias_role.map(|role| self.bias_of(&weight, role, vec![rows]));
        if weight.plane.is_some() {
            let experts = self.lookups.or_default("moe.experts", &self.tables.moe.experts, 0)?;
            let shapes = std::iter::once(&mut weight).chain(&mut bias).map(|slice| &mut slice.shape);
            shapes.for_each(|shape| shape.insert(0, experts));
        }
        Ok(LinearSpec { n, k, weight, bias })
    }

    /// Returns whether matrices, or those of routed experts, are stored as (in, out).
    fn transposed(&mut self, of_experts: bool) -> Result<bool> {
        let all = self.lookups.or_default("tensors.transposed", &self.tables.tensors.transposed, false)?;
        match of_experts {
            true => self.lookups.or_default("moe.transposed", &self.tables.moe.transposed, all),
            false => Ok(all),
        }
    }

    /// Resolves a norm of the specification's kind.
    pub fn norm(
        &mut self,
        role: &'static str,
        names: &Option<OneOrMore<String>>,
        width: usize,
    ) -> Result<NormSpec> {
        let kind = self.lookups.required("norm.kind", &self.tables.norm.kind)?;
        let has_bias = self.norm_bias()?;
        self.norm_of_kind((norm_kind(kind), has_bias), role, names, (None, width))
    }

    /// Returns whether norms have biases, if they can.
    pub fn norm_bias(&mut self) -> Result<bool> {
        self.lookups.or_default("norm.bias", &self.tables.norm.bias, true)
    }

    /// Resolves a norm of the given kind, whose bias is optional. `heads` is given if each head has weights
    /// of its own.
    pub fn norm_of_kind(
        &mut self,
        (kind, has_bias): (NormKind, bool),
        role: &'static str,
        names: &Option<OneOrMore<String>>,
        (heads, width): (Option<usize>, usize),
    ) -> Result<NormSpec> {
        let table = &self.tables.norm;
        let eps = self.lookups.required("norm.eps", &table.eps)? as f32;
        let offset = self.lookups.or_default("norm.offset", &table.offset, 0.0)? as f32;
        let mut norm = NormSpec { kind, weights: Vec::new(), biases: Vec::new(), offset, width, eps };
        if self.lookups.or_default("norm.weight", &table.weight, true)? {
            norm.weights = match heads {
                Some(heads) => self.weights_by_head(role, names, (heads, width))?,
                None => vec![self.slice(role, names, vec![width], TensorPart::Whole, None)?],
            };
        }
        if has_bias && kind == NormKind::Layer {
            let bias = |weight| self.bias_of(weight, role, weight.shape.clone());
            norm.biases = norm.weights.iter().map(bias).collect();
        }
        Ok(norm)
    }

    /// Returns the weights that each of `heads` heads has of its own, (width) each: a row of one tensor, or
    /// a tensor whose name has the head for `{h}`.
    fn weights_by_head(
        &self,
        role: &'static str,
        names: &Option<OneOrMore<String>>,
        (heads, width): (usize, usize),
    ) -> Result<Vec<TensorSlice>> {
        let weight = |head: usize| {
            let own = names.as_ref().map(|names| {
                let own = |name: &String| name.replace("{h}", &head.to_string());
                OneOrMore::More(names.as_slice().iter().map(own).collect())
            });
            if names.as_ref().is_some_and(|names| names.as_slice().iter().any(|name| name.contains("{h}"))) {
                return self.slice(role, &own, vec![width], TensorPart::Whole, None);
            }
            let part = TensorPart::Rows { groups: 1, stride: heads, first: head, count: 1 };
            self.slice(role, &own, vec![heads, width], part, None)
        };
        (0..heads).map(weight).collect()
    }

    /// Returns the placement of the sub-layers' norms.
    pub fn placement(&mut self) -> Result<Placement> {
        self.lookups.or_default("norm.placement", &self.tables.norm.placement, Placement::Pre)
    }
}

/// Returns the possible names in a file: first as they are, then with and without each prefix.
pub(super) fn candidate_names(names: &OneOrMore<String>, prefixes: Prefixes) -> Vec<String> {
    let each = names.as_slice().iter();
    each.flat_map(|name| {
        let prefixed = prefixes.added.iter().map(move |prefix| format!("{prefix}{name}"));
        let shorter = prefixes.optional.iter().filter_map(move |prefix| name.strip_prefix(prefix.as_str()));
        std::iter::once(name.clone()).chain(prefixed).chain(shorter.map(str::to_owned))
    })
    .collect()
}

/// Returns the activation of the layer's MLP.
pub(super) fn activation(fill: &mut ResolveContext) -> Result<Activation> {
    activation_of(fill.lookups.required("mlp.activation", &fill.tables.mlp.activation)?)
}

/// Returns the activation with that name. Fails if it has learned numbers, which only dense MLPs can have.
pub(super) fn activation_of(name: ActivationName) -> Result<Activation> {
    Ok(match name {
        ActivationName::Relu => Activation::Relu,
        ActivationName::SquaredRelu => Activation::SquaredRelu,
        ActivationName::Gelu => Activation::Gelu,
        ActivationName::GeluTanh => Activation::GeluTanh,
        ActivationName::QuickGelu => Activation::QuickGelu,
        ActivationName::Silu => Activation::Silu,
        ActivationName::Tanh => Activation::Tanh,
        ActivationName::ClampedSwiglu => Activation::ClampedSwiglu,
        ActivationName::Xielu => bail!("'xielu' is an activation for 'mlp.activation' of dense MLPs only"),
    })
}

/// Returns the kind of norm with that name.
pub(super) fn norm_kind(name: NormName) -> NormKind {
    match name {
        NormName::Rms => NormKind::Rms,
        NormName::Layer => NormKind::Layer,
    }
}

/// Returns the number if it is positive.
pub(super) fn positive(number: f32) -> Option<f32> {
    (number > 0.0).then_some(number)
}
