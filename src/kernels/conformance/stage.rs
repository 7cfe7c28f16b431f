//! Tests of the operations among the ranks of a stage, each on its own thread.

use super::inputs::*;
use super::rig::*;
use mainstem_kernels::backend::{Backend, OutputColumns};
use mainstem_kernels::collective::Aborted;
use mainstem_kernels::collective::local::{Abort, LocalRank, create_ranks};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Numbers of ranks.
const RANK_COUNTS: [usize; 3] = [1, 2, 3];
/// Numbers that ranks exchange in one round; some sizes need several rounds.
const BUFFER_LEN: usize = 100;

/// Runs `work` on every rank of a stage; returns the results in rank order.
fn on_all_ranks<B: Backend, T: Send>(
    make: &(impl Fn() -> B + Sync),
    count: usize,
    work: impl Fn(&mut Rig<B>, usize) -> T + Sync,
) -> Vec<T> {
    let run = |local: LocalRank| {
        let mut backend = make();
        backend.join_stage(Box::new(local));
        let (rank, ranks) = backend.rank_and_count();
        assert_eq!(ranks, count, "ranks of the stage");
        work(&mut Rig::new(backend, limits(32)), rank)
    };
    std::thread::scope(|scope| {
        let locals = create_ranks(count, BUFFER_LEN, &Abort::new()).into_iter();
        let threads: Vec<_> = locals.map(|local| scope.spawn(|| run(local))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    })
}

/// Tests that an all-reduce has the bits of an addition in rank order, on every rank.
pub fn stage_all_reduce<B: Backend>(make: &(impl Fn() -> B + Sync)) {
    for count in RANK_COUNTS {
        let of = |rank: usize, n| scaled(30 + rank as u32, n, [1.0, 1e4, 1e-3][rank]);
        let sums = on_all_ranks(make, count, |rig, rank| {
            let sizes = sizes().map(|(rows, width)| {
                let mut x = rig.in_out(&of(rank, rows * width));
                rig.backend.all_reduce(rows, width, &mut x);
                rig.read(&x, rows * width, format_args!("sum of {rows} rows of {width} over {count}"))
            });
            sizes.collect::<Vec<_>>()
        });
        for (rank, sums) in sums.iter().enumerate() {
            for ((rows, width), got) in sizes().zip(sums) {
                let mut want = of(0, rows * width);
                for other in 1..count {
                    want.iter_mut().zip(of(other, rows * width)).for_each(|(sum, term)| *sum += term);
                }
                let what = format_args!("sum of {rows} rows of {width} over {count} on {rank}");
                assert_same(what, got, &want, 0.0);
            }
        }
    }
}

/// Tests that an all-gather concatenates the columns of all ranks, including ranks without columns, and that
/// `copy_columns` extracts the own columns again.
pub fn stage_all_gather<B: Backend>(make: &(impl Fn() -> B + Sync)) {
    for widths in [&[5][..], &[1, 33], &[7, 0, 16], &[0, 300, 1], &[64, 64]] {
        on_all_ranks(make, widths.len(), |rig, rank| {
            ROWS.iter().for_each(|rows| assert_gathered(rig, *rows, widths, rank));
        });
    }
}

/// Tests one all-gather.
fn assert_gathered<B: Backend>(rig: &mut Rig<B>, rows: usize, widths: &[usize], rank: usize) {
    let what = format_args!("{rows} rows of {widths:?} gathered on {rank}");
    let of = |rank: usize| noise(40 + rank as u32, rows * widths[rank]);
    let width = widths.iter().sum::<usize>();
    let parts = (0..rows).flat_map(|row| (0..widths.len()).map(move |rank| (row, rank)));
    let want = parts.flat_map(|(row, rank)| of(rank)[row * widths[rank]..][..widths[rank]].to_vec());
    let (own, mut all) = (rig.input(&of(rank)), rig.output(rows * width));
    rig.backend.all_gather(rows, widths, &own, &mut all);
    assert_same(what, &rig.read(&all, rows * width, what), &want.collect::<Vec<_>>(), 0.0);
    if widths[rank] > 0 {
        let first = widths[..rank].iter().sum::<usize>();
        let mut back = rig.output(rows * widths[rank]);
        let own = first..first + widths[rank];
        rig.backend.copy_columns(
            (rows, 1),
            (width, own, &all),
            (OutputColumns::all(widths[rank]), &mut back),
        );
        assert_same(what, &rig.read(&back, rows * widths[rank], what), &of(rank), 0.0);
    }
}

/// Tests that when a rank is dropped, operations of the others unwind with [`Aborted`].
pub fn stage_abort<B: Backend>(make: &(impl Fn() -> B + Sync)) {
    let payloads = on_all_ranks(make, 3, |rig, rank| {
        let mut x = rig.in_out(&noise(50, 64));
        match rank {
            0 => None,
            1 => catch_unwind(AssertUnwindSafe(|| rig.backend.all_reduce(1, 64, &mut x))).err(),
            _ => {
                let mut all = rig.output(3 * 64);
                let widths = [64; 3];
                catch_unwind(AssertUnwindSafe(|| rig.backend.all_gather(1, &widths, &x, &mut all))).err()
            }
        }
    });
    for (rank, payload) in payloads.into_iter().enumerate().skip(1) {
        assert!(
            payload.is_some_and(|payload| payload.is::<Aborted>()),
            "rank {rank} did not unwind with Aborted"
        );
    }
}

/// Tests that columns are copied unchanged, from any place of a row to any other, of one row or several, and
/// that no other columns are written.
pub fn columns<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    for (rows, width) in sizes() {
        let x = noise(60, rows * width);
        for columns in [0..width, width / 3..width / 2 + 1, width - 1..width, 0..1] {
            let apart = OutputColumns { first: 2, of: columns.len() + 3 };
            for (to, copies) in [(OutputColumns::all(columns.len()), 1), (apart, 1), (apart, 3)] {
                let what = format_args!("columns {columns:?} of {rows} rows of {width}, {copies} times");
                let mut want = noise(61, rows * copies * to.of);
                let (from, mut y) = (rig.input(&x), rig.in_out(&want));
                rig.backend.copy_columns((rows, copies), (width, columns.clone(), &from), (to, &mut y));
                for (x, y) in x.chunks_exact(width).zip(want.chunks_exact_mut(copies * to.of)) {
                    for y in y.chunks_exact_mut(to.of) {
                        y[to.first..][..columns.len()].copy_from_slice(&x[columns.clone()]);
                    }
                }
                assert_same(what, &rig.read(&y, want.len(), what), &want, 0.0);
            }
        }
    }
}
