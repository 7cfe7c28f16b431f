//! Sampling of output rows.
//!
//! The rows of a call are launched in up to three parts: those without late inputs, those that wait for
//! masks, and those whose tokens the host draws. The host waits for the inputs of a part while the GPU works
//! on the one before, and copies the results of all parts at once.
//!
//! Invariant: the token is that of [`crate::reference::sample`]. Nothing is allocated during a step.

use super::launch::{Device, THREADS, blocks_for, check_len, f32_bytes};
use super::masks::{self, Masks};
use super::program::KernelName;
use super::steps::Steps;
use super::{CudaBackend, NOT_PREPARED};
use crate::backend::{DeviceError, SamplingInputs, StepLimits};
use crate::batch::{RowFailure, SampleMode, SampledToken, SamplingParams, SlotMove, StepBatch, StepOutput};
use crate::cuda::{Arguments, CudaBuf};
use crate::host::{HostBuf, HostMemory};
use std::ops::Range;

/// Number of scratch buffers: how to sample each row, biases or counts that change, masks, edited logits,
/// results, and the counts of tokens (slots, vocabulary).
pub(super) const BUFFERS: usize = 6;

/// Bytes that say how to sample a row: `SampleRow` of `sampling.cu`.
const RECORD_BYTES: usize = 68;

/// Biases or counts that are copied at a time, and the bytes of one.
const BIASES: usize = 1 << 14;
const BIAS_BYTES: usize = 8;

/// Words of a result, `SampleResult` of `sampling.cu`, before the most likely tokens, and of one of those.
const RESULT_WORDS: usize = 8;
const TOP_WORDS: usize = 2;

/// Most threads of a block that samples a row, and the logits for each thread of a smaller one.
const MOST_THREADS: usize = 512;
const LOGITS_OF_THREAD: usize = 8;

/// Flags of a row: `ROW_IS_SAMPLED` and so on of `sampling.cu`.
const IS_SAMPLED: u32 = 1;
const IS_GREEDY: u32 = 2;
const IS_MASKED: u32 = 4;
const IS_RANKED: u32 = 8;
const HAS_LOGPROBS: u32 = 16;
const IS_PENALIZED: u32 = 32;

/// The slot of a row whose token is not stored.
const NO_SLOT: u32 = u32::MAX;

/// Returns the bytes of the scratch buffers.
pub(super) fn scratch_bytes(limits: &StepLimits) -> [usize; BUFFERS] {
    let rows = limits.logit_rows;
    [
        rows * RECORD_BYTES,
        BIASES * BIAS_BYTES,
        masks::bytes(limits),
        f32_bytes(rows * limits.vocab),
        rows * result_bytes(limits),
        limits.token_counts_len() * size_of::<u16>(),
    ]
}

/// Returns the bytes of the result of a row, with its most likely tokens.
fn result_bytes(limits: &StepLimits) -> usize {
    (RESULT_WORDS + TOP_WORDS * limits.top_logprobs.min(limits.vocab)) * size_of::<u32>()
}

/// The host memory of sampling.
pub(super) struct Sampler {
    /// The logits of a row that the host draws.
    logits: HostBuf,
    /// Kept logits of drafts, (slots, drafts, vocabulary), which only the host reads.
    kept: HostBuf,
    masks: Masks,
    /// Whether the late input of a row did not come.
    is_lost: Vec<bool>,
    /// Bytes that are copied next, and the results.
    staged: Vec<u8>,
    results: Vec<u8>,
}

impl Sampler {
    /// Allocates memory for steps within `limits`, and loads the kernels.
    pub fn new(device: &mut Device, limits: &StepLimits) -> Result<Sampler, DeviceError> {
        device.load(KernelName::sampling("sample"))?;
        device.load(KernelName::sampling("add_biases"))?;
        device.load(KernelName::sampling("store_tokens"))?;
        device.load(KernelName::sampling("penalize"))?;
        device.load(KernelName::sampling("write_counts"))?;
        let memory = HostMemory::default();
        let [records, biases, _, _, results, _] = scratch_bytes(limits);
        Ok(Sampler {
            logits: memory.zeroed(f32_bytes(limits.vocab))?,
            kept: memory.zeroed(f32_bytes(limits.draft_logits_len()))?,
            masks: Masks::new(limits),
            is_lost: vec![false; limits.logit_rows],
            staged: Vec::with_capacity(records.max(biases)),
            results: vec![0; results],
        })
    }
}

/// The late input that a row waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Nothing,
    Mask,
    Token,
}

/// Returns what a row waits for before it is sampled.
fn awaited(row: &SamplingParams) -> Awaited {
    match row.mode {
        SampleMode::Sample if row.masked => Awaited::Mask,
        SampleMode::Sample | SampleMode::Score(_) => Awaited::Nothing,
        SampleMode::Host => Awaited::Token,
    }
}

impl CudaBackend {
    /// Clears the masks on the GPU, as their copies on the host are.
    pub(super) fn clear_masks(&mut self) -> Result<(), DeviceError> {
        let masks = &mut self.sample_scratch.0[2];
        self.device.context.clear(masks, 0, masks.len())
    }

    /// Moves the counts of slots, and applies the changes of a batch, if there are counts.
    pub(super) fn change_counts(&mut self, batch: &StepBatch) -> Result<(), DeviceError> {
        let limits = &self.steps().state.limits;
        if !limits.counts_tokens {
            return Ok(());
        }
        let bytes = limits.vocab * size_of::<u16>();
        let [_, changes, _, _, _, counts] = &mut self.sample_scratch.0;
        let staged = &mut self.sampler.as_mut().expect(NOT_PREPARED).staged;
        for SlotMove { from, to } in &batch.moves {
            self.device.context.copy_within(counts, *from as usize * bytes, *to as usize * bytes, bytes)?;
        }
        for change in &batch.count_changes {
            let at = change.slot as usize * bytes;
            self.device.context.clear(counts, at, bytes)?;
            for part in change.counts(batch).chunks(BIASES) {
                staged.clear();
                staged.extend(
                    part.iter().flat_map(|(id, count)| [*id, u32::from(*count)]).flat_map(u32::to_le_bytes),
                );
                self.device.context.upload(changes, 0, staged)?;
                let arguments = Arguments::default().int(part.len()).buf(changes, staged.len());
                let arguments = arguments.buf_at(counts, at, bytes);
                let grid = (blocks_for(part.len()), THREADS);
                self.device.launch(KernelName::sampling("write_counts"), grid, arguments)?;
            }
        }
        Ok(())
    }

    /// Computes [`crate::Backend::sample`].
    pub(super) fn sample_rows(
        &mut self,
        outputs: Range<usize>,
        logits: &CudaBuf,
        inputs: SamplingInputs<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let steps = self.steps.as_mut().expect(NOT_PREPARED);
        let state = &steps.state;
        let vocab = state.limits.vocab;
        let width = inputs.width.unwrap_or(vocab);
        assert!(outputs.end <= state.samples().len(), "outputs {outputs:?}");
        assert!(outputs.len() <= state.limits.logit_rows, "{} rows exceed the limits", outputs.len());
        check_len(logits, outputs.len() * width);
        if outputs.is_empty() {
            return Ok(());
        }
        let mut call = Call {
            device: &mut self.device,
            buffers: &mut self.sample_scratch.0,
            sampler: self.sampler.as_mut().expect(NOT_PREPARED),
            steps,
            outputs,
            logits,
            inputs,
            width,
            n: width.min(vocab),
        };
        call.keep_draft_logits()?;
        call.begin_draws()?;
        for part in [Awaited::Nothing, Awaited::Mask, Awaited::Token] {
            call.launch(part)?;
        }
        call.append_results(out)
    }
}

/// The rows of a call.
struct Call<'a> {
    device: &'a mut Device,
    buffers: &'a mut [CudaBuf; BUFFERS],
    sampler: &'a mut Sampler,
    steps: &'a mut Steps,
    outputs: Range<usize>,
    /// Logits (outputs, width).
    logits: &'a CudaBuf,
    inputs: SamplingInputs<'a>,
    width: usize,
    /// The logits of a row that count: no more than the vocabulary.
    n: usize,
}

impl Call<'_> {
    /// Copies the logits of the rows that sample drafts to the host, if the step keeps them.
    fn keep_draft_logits(&mut self) -> Result<(), DeviceError> {
        let (vocab, n) = (self.steps.state.limits.vocab, self.n);
        for (i, output) in self.outputs.clone().enumerate() {
            let Some(row) = self.steps.state.kept_row(output) else { continue };
            let kept = &mut self.sampler.kept.f32_mut()[row * vocab..][..vocab];
            kept[n..].fill(f32::NEG_INFINITY);
            let kept = &mut self.sampler.kept.bytes_mut()[f32_bytes(row * vocab)..][..f32_bytes(n)];
            self.device.context.download(self.logits, f32_bytes(i * self.width), kept)?;
        }
        Ok(())
    }

    /// Hands over the rows that the host draws.
    fn begin_draws(&mut self) -> Result<(), DeviceError> {
        let first = self.steps.state.first_sample();
        for (i, output) in self.outputs.clone().enumerate() {
            if self.steps.state.samples()[output].mode != SampleMode::Host {
                continue;
            }
            let Sampler { logits, kept, .. } = &mut *self.sampler;
            let row = &mut logits.bytes_mut()[..f32_bytes(self.n)];
            self.device.context.download(self.logits, f32_bytes(i * self.width), row)?;
            let given = self.steps.state.host_row(output, &logits.f32()[..self.n], kept.f32());
            self.inputs.begin_draw(first + output, given);
        }
        Ok(())
    }

    /// Waits for the late inputs of the rows that have such ones, and queues their sampling.
    fn launch(&mut self, part: Awaited) -> Result<(), DeviceError> {
        self.sampler.staged.clear();
        let (mut biases, mut is_penalized): (Option<Range<usize>>, bool) = (None, false);
        for (i, output) in self.outputs.clone().enumerate() {
            let params = self.steps.state.samples()[output];
            if awaited(&params) != part {
                continue;
            }
            let top_max = self.steps.state.limits.top_logprobs;
            assert!(top_len(&params, self.n) <= top_max, "more than {top_max} most likely tokens");
            let token = self.wait(i, &params)?;
            self.sampler.is_lost[i] = token.is_none();
            let Some(token) = token else { continue };
            let counted = self.counted_slot(output);
            append_record(&mut self.sampler.staged, (i, counted), (&params, token), self.n);
            is_penalized |= counted.is_some();
            if params.mode == SampleMode::Sample && params.bias_len > 0 {
                let start = params.bias_at as usize;
                let own = start..start + params.bias_len as usize;
                let all = biases.unwrap_or(own.clone());
                biases = Some(all.start.min(own.start)..all.end.max(own.end));
            }
        }
        let rows = self.sampler.staged.len() / RECORD_BYTES;
        if rows == 0 {
            return Ok(());
        }
        self.device.context.upload(&mut self.buffers[0], 0, &self.sampler.staged)?;
        if let Some(biases) = biases {
            self.add_biases(rows, biases)?;
        }
        if is_penalized {
            self.penalize(rows)?;
        }
        self.sampler.masks.copy(&mut self.device.context, &mut self.buffers[2])?;
        self.sample(rows)
    }

    /// Returns the slot whose counts the penalties of an output row use, and that counts its token; `None` if
    /// it has no penalties.
    fn counted_slot(&self, output: usize) -> Option<usize> {
        let state = &self.steps.state;
        state.token_slot(output).filter(|_| state.samples()[output].is_penalized())
    }

    /// Waits for the late input of row `i` of the call, if it has one. Returns its token, 0 if it is to be
    /// sampled; `None` if the input does not come.
    fn wait(&mut self, i: usize, params: &SamplingParams) -> Result<Option<u32>, DeviceError> {
        let row = self.steps.state.first_sample() + self.outputs.start + i;
        Ok(match params.mode {
            SampleMode::Sample if params.masked => {
                let words = self.n.div_ceil(u32::BITS as usize);
                let masks = &mut self.sampler.masks;
                let has_come = self.inputs.wait_mask(row, masks.next(words));
                if has_come {
                    masks.keep((&mut self.device.context, &mut self.buffers[2]), i, words)?;
                }
                has_come.then_some(0)
            }
            SampleMode::Sample => Some(0),
            SampleMode::Host => self.inputs.wait_token(row, self.n),
            SampleMode::Score(token) => {
                assert!((token as usize) < self.n, "the scored token {token} is beyond the vocabulary");
                Some(token)
            }
        })
    }

    /// Queues the addition of some of the batch's biases to the rows that are staged on the GPU.
    fn add_biases(&mut self, rows: usize, range: Range<usize>) -> Result<(), DeviceError> {
        let values = self.outputs.len() * self.n;
        let parts = self.inputs.biases[range.clone()].chunks(BIASES);
        for (first, part) in range.clone().step_by(BIASES).zip(parts) {
            let staged = &mut self.sampler.staged;
            staged.clear();
            staged
                .extend(part.iter().flat_map(|(id, bias)| [*id, bias.to_bits()]).flat_map(u32::to_le_bytes));
            self.device.context.upload(&mut self.buffers[1], 0, staged)?;
            let is_first = usize::from(first == range.start);
            let arguments = Arguments::default().buf(&self.buffers[0], rows * RECORD_BYTES);
            let arguments = arguments.int(self.width).int(self.n).int(first).int(part.len()).int(is_first);
            let arguments = arguments.buf(&self.buffers[1], staged.len());
            let arguments = arguments.buf(self.logits, f32_bytes(self.outputs.len() * self.width));
            let arguments = arguments.buf(&self.buffers[3], f32_bytes(values));
            let grid = ([rows, 1, 1], self.threads());
            self.device.launch(KernelName::sampling("add_biases"), grid, arguments)?;
        }
        Ok(())
    }

    /// Queues the penalties of the rows that are staged on the GPU.
    fn penalize(&mut self, rows: usize) -> Result<(), DeviceError> {
        let (outputs, vocab) = (self.outputs.len(), self.steps.state.limits.vocab);
        let arguments = Arguments::default().buf(&self.buffers[0], rows * RECORD_BYTES);
        let arguments = arguments.int(self.width).int(self.n).int(vocab);
        let arguments = arguments.buf(self.logits, f32_bytes(outputs * self.width));
        let arguments = arguments.buf(&self.buffers[5], self.buffers[5].len());
        let arguments = arguments.buf(&self.buffers[3], f32_bytes(outputs * self.n));
        let grid = ([rows, 1, 1], self.threads());
        self.device.launch(KernelName::sampling("penalize"), grid, arguments)
    }

    /// Queues the sampling of the rows that are staged on the GPU.
    fn sample(&mut self, rows: usize) -> Result<(), DeviceError> {
        let limits = &self.steps.state.limits;
        let (outputs, bytes, mask_words) = (self.outputs.len(), result_bytes(limits), limits.mask_words());
        let arguments = Arguments::default().buf(&self.buffers[0], rows * RECORD_BYTES);
        let arguments = arguments.int(self.width).int(self.n).int(mask_words).int(bytes);
        let arguments = arguments.buf(self.logits, f32_bytes(outputs * self.width));
        let arguments = arguments.buf(&self.buffers[2], f32_bytes(outputs * mask_words));
        let arguments = arguments.buf(&self.buffers[3], f32_bytes(outputs * self.n));
        let arguments = arguments.buf(&self.buffers[4], outputs * bytes);
        let grid = ([rows, 1, 1], self.threads());
        self.device.launch(KernelName::sampling("sample"), grid, arguments)
    }

    /// Returns the threads of a block. The order of the sum of log-probabilities follows from it.
    fn threads(&self) -> u32 {
        let threads = self.n.div_ceil(LOGITS_OF_THREAD).next_multiple_of(32);
        threads.min(MOST_THREADS) as u32
    }

    /// Queues the storing of the sampled tokens as the last ones of their slots.
    fn store_tokens(&mut self) -> Result<(), DeviceError> {
        let (rows, bytes) = (self.outputs.len(), result_bytes(&self.steps.state.limits));
        self.sampler.staged.clear();
        for (i, output) in self.outputs.clone().enumerate() {
            let is_scored = matches!(self.steps.state.samples()[output].mode, SampleMode::Score(_));
            let slot = self.steps.state.token_slot(output).filter(|_| !is_scored && !self.sampler.is_lost[i]);
            let slot = slot.map_or(NO_SLOT, |slot| slot as u32);
            let is_counted = u32::from(self.counted_slot(output).is_some());
            self.sampler.staged.extend([slot, is_counted].into_iter().flat_map(u32::to_le_bytes));
        }
        self.device.context.upload(&mut self.buffers[0], 0, &self.sampler.staged)?;
        let arguments = Arguments::default().int(rows).buf(&self.buffers[0], self.sampler.staged.len());
        let arguments = arguments.int(bytes).buf(&self.buffers[4], rows * bytes);
        let arguments = self.steps.last_tokens(arguments).int(self.steps.state.limits.vocab);
        let arguments = arguments.buf(&self.buffers[5], self.buffers[5].len());
        self.device.launch(KernelName::sampling("store_tokens"), ([1; 3], 1), arguments)
    }

    /// Copies the results from the GPU, appends them, and stores the sampled tokens on the host, too.
    fn append_results(&mut self, out: &mut StepOutput) -> Result<(), DeviceError> {
        self.store_tokens()?;
        let bytes = result_bytes(&self.steps.state.limits);
        let results = &mut self.sampler.results[..self.outputs.len() * bytes];
        self.device.context.download(&self.buffers[4], 0, results)?;
        let rows = self.outputs.clone().zip(&self.sampler.is_lost).zip(results.chunks_exact(bytes));
        for ((output, is_lost), result) in rows {
            let params = self.steps.state.samples()[output];
            let top_at = out.top_logprobs.len() as u32;
            let result = match is_lost {
                true => SampledToken::failed(RowFailure::NoLateInput),
                false => read_result(result.as_chunks().0, &params, self.n, &mut out.top_logprobs),
            };
            if result.failure.is_none() && !matches!(params.mode, SampleMode::Score(_)) {
                self.steps.state.store_token(output, result.token);
            }
            out.tokens.push(SampledToken { top_at, ..result });
        }
        Ok(())
    }
}

/// Appends how to sample row `number` of a call, in the layout of `SampleRow`. It has this token, unless it
/// is to be sampled, and penalties if there is a slot whose counts they use.
fn append_record(
    to: &mut Vec<u8>,
    (number, counted): (usize, Option<usize>),
    (row, token): (&SamplingParams, u32),
    n: usize,
) {
    let is_sampled = row.mode == SampleMode::Sample;
    let flags = [
        (IS_SAMPLED, is_sampled),
        (IS_GREEDY, row.is_greedy()),
        (IS_MASKED, row.is_masked()),
        (IS_RANKED, is_ranked(row)),
        (HAS_LOGPROBS, row.logprob || row.top_logprobs > 0),
        (IS_PENALIZED, counted.is_some()),
    ];
    let flags = flags.into_iter().filter(|(_, is_set)| *is_set).fold(0, |all, (flag, _)| all | flag);
    let fields: [u32; RECORD_BYTES / size_of::<u32>()] = [
        number as u32,
        flags,
        token,
        row.position,
        row.seed as u32,
        (row.seed >> 32) as u32,
        row.temperature.to_bits(),
        row.top_k,
        row.top_p.to_bits(),
        row.min_p.to_bits(),
        row.bias_at,
        if is_sampled { row.bias_len } else { 0 },
        top_len(row, n) as u32,
        row.penalties.repetition.to_bits(),
        row.penalties.presence.to_bits(),
        row.penalties.frequency.to_bits(),
        counted.unwrap_or(0) as u32,
    ];
    to.extend(fields.into_iter().flat_map(u32::to_le_bytes));
}

/// Returns whether the rank of a row's token is reported.
fn is_ranked(row: &SamplingParams) -> bool {
    row.logprob && matches!(row.mode, SampleMode::Score(_))
}

/// Returns the number of most likely tokens that are reported for a row with `n` logits.
fn top_len(row: &SamplingParams, n: usize) -> usize {
    usize::from(row.top_logprobs).min(n)
}

/// Reads the result of a row with `n` logits, in the layout of `SampleResult`, and appends its most likely
/// tokens to `top`.
fn read_result(
    words: &[[u8; 4]],
    params: &SamplingParams,
    n: usize,
    top: &mut Vec<(u32, f32)>,
) -> SampledToken {
    let (words, tokens) = words.split_at(RESULT_WORDS);
    let word = |number: usize| u32::from_le_bytes(words[number]);
    let [token, failure, rank, logit, largest, _, low, high] = [0, 1, 2, 3, 4, 5, 6, 7].map(word);
    let result = match failure {
        0 => SampledToken::new(token),
        1 => return SampledToken::failed(RowFailure::NotFinite),
        _ => return SampledToken::failed(RowFailure::EmptyMask),
    };
    let sum = f64::from_bits(u64::from(high) << 32 | u64::from(low));
    let log_sum = f64::from(f32::from_bits(largest)) + sum.ln();
    let logprob = |logit: u32| (f64::from(f32::from_bits(logit)) - log_sum) as f32;
    let tokens = &tokens.as_chunks::<TOP_WORDS>().0[..top_len(params, n)];
    let entries = tokens.iter().map(|entry| entry.map(u32::from_le_bytes));
    top.extend(entries.map(|[id, logit]| (id, logprob(logit))));
    SampledToken {
        logprob: if params.logprob { logprob(logit) } else { f32::NAN },
        rank: if is_ranked(params) { rank } else { 0 },
        top_len: tokens.len() as u32,
        ..result
    }
}
