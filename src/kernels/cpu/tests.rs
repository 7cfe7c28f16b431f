//! What the conformance suite cannot see: that bits agree across instruction sets, threads and tilings.

use super::*;
use crate::conformance::{fingerprint, noise};
use crate::reference::draw;
use crate::{SampleMode, SampleRow, Span, SpanModel, SpanTable, SpanTokens, Want};

fn backend(isa: Isa, threads: usize) -> Option<CpuBackend> {
    CpuBackend::new(CpuConfig { threads, isa })
        .inspect_err(|error| eprintln!("skipped: {}: {error}", isa.name()))
        .ok()
}

fn limits(rows: usize, vocab: usize) -> StepLimits {
    StepLimits {
        slots: rows,
        rows,
        logit_rows: rows,
        positions: 64,
        page_positions: 32,
        top_logprobs: 5,
        biases: 0,
        vocab,
    }
}

fn f32_buf(values: &[f32]) -> HostBuf {
    let mut buf = HostBuf::zeroed(size_of_val(values)).unwrap();
    buf.f32_mut().copy_from_slice(values);
    buf
}

/// Bits of x (rows, inp) · wᵀ, row by row.
fn product(cpu: &mut CpuBackend, ty: QuantType, rows: usize, out: usize, inp: usize) -> Vec<Vec<u32>> {
    let mut codes = vec![0; ty.bytes(out * inp).unwrap()];
    (ty.row().quantize)(&noise(1, out * inp), &mut codes);
    cpu.prepare(&limits(rows, 1)).unwrap();
    let w = cpu.upload_weight(ty, out, inp, &codes).unwrap();
    let (x, bias) = (f32_buf(&noise(2, 64 * inp)[..rows * inp]), f32_buf(&noise(3, out)));
    let mut y = cpu.alloc(rows * out * 4).unwrap();
    cpu.matmul(rows, &w, Some(&bias), &x, &mut y);
    y.f32().chunks(out).map(|row| row.iter().map(|y| y.to_bits()).collect()).collect()
}

#[test]
fn products_have_the_same_bits_in_any_arrangement() {
    // Odd ends, several cuts, panels and items; a width at which few outs fit a panel.
    for (out, inp) in [(5, 33), (129, 1000), (67, 2048), (10, 20_000)] {
        for ty in QuantType::all() {
            for isa in [Isa::Avx512, Isa::Avx2, Isa::Portable] {
                let Some(mut alone) = backend(isa, 1) else { continue };
                let whole = product(&mut alone, ty, 64, out, inp);
                for threads in 1..4 {
                    let mut cpu = backend(isa, threads).expect("it was there");
                    for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 31, 64] {
                        let part = product(&mut cpu, ty, rows, out, inp);
                        assert!(
                            part[..] == whole[..rows],
                            "{isa:?} {threads} threads {ty} {rows}x{inp}x{out}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn fused_instruction_sets_have_the_same_bits() {
    let (Some(mut wide), Some(mut narrow)) = (backend(Isa::Avx512, 2), backend(Isa::Avx2, 2)) else { return };
    for ty in QuantType::all() {
        assert!(product(&mut wide, ty, 37, 130, 1001) == product(&mut narrow, ty, 37, 130, 1001), "{ty}");
    }
    let make = |isa| move || backend(isa, 2).expect("it was there");
    assert!(fingerprint(&make(Isa::Avx512)) == fingerprint(&make(Isa::Avx2)));
}

/// Draws with many seeds from one row of logits, on device and by definition.
fn draws_agree(logits: &[f32], rows: &[SampleRow]) {
    let mut cpu = backend(Isa::Auto, 2).expect("there is always an instruction set");
    cpu.prepare(&limits(rows.len(), logits.len())).unwrap();
    let mut batch = StepBatch { samples: rows.to_vec(), ..StepBatch::default() };
    for slot in 0..rows.len() as u32 {
        let span = Span {
            model: SpanModel::Target,
            slot,
            start: 0,
            tokens: SpanTokens::Last,
            table: SpanTable::Own,
            want: Want::Last,
        };
        batch.spans.push(span);
    }
    cpu.begin(&batch);
    let mut out = StepOutput::default();
    cpu.sample(0..rows.len(), &f32_buf(&logits.repeat(rows.len())), &mut out);
    for (row, result) in rows.iter().zip(&out.rows) {
        assert_eq!(result.token, draw(logits, &[], row), "{row:?}");
    }
}

#[test]
fn draws_from_flat_and_steep_rows_are_the_definitions() {
    for (tag, steepness) in [(1, 0.0), (2, 1e-3), (3, 1.0), (4, 4.0), (5, 60.0)] {
        let logits: Vec<f32> = noise(tag, 5000).iter().map(|x| x * steepness).collect();
        let mut rows = Vec::new();
        for (i, (top_k, top_p, min_p)) in [
            (0, 1.0, 0.0),
            (0, 0.9, 0.0),
            (0, 1.0, 0.05),
            (300, 0.99, 0.0),
            (5000, 1.0, 0.01),
            (9000, 0.5, 0.1),
        ]
        .into_iter()
        .enumerate()
        {
            rows.extend((0..12).map(|seed| SampleRow {
                mode: SampleMode::Draw,
                position: i as u32,
                seed,
                temperature: 0.7,
                top_k,
                top_p,
                min_p,
                ..SampleRow::GREEDY
            }));
        }
        draws_agree(&logits, &rows);
    }
}

#[test]
fn what_cannot_be_made_is_said() {
    assert!(CpuBackend::new(CpuConfig { threads: 0, isa: Isa::Auto }).is_err());
    let cpu = CpuBackend::new(CpuConfig { threads: 2, isa: Isa::Portable }).unwrap();
    assert_eq!(cpu.describe(), "cpu (portable, 2 threads)");
}
