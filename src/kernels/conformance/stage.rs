//! What the members of a stage make together, each on a thread of its own.

use super::inputs::*;
use super::rig::*;
use crate::backend::Backend;
use crate::collective::Aborted;
use crate::collective::local::{Abort, LocalMember, stage};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Members of the stages here.
const MEMBERS: [usize; 3] = [1, 2, 3];
/// Numbers that they exchange at a time: some sizes need several times.
const EXCHANGED: usize = 100;

/// Does the same on every member of a stage; what each gives, by rank.
fn together<B: Backend, T: Send>(
    make: &(impl Fn() -> B + Sync),
    members: usize,
    work: impl Fn(&mut Rig<B>, usize) -> T + Sync,
) -> Vec<T> {
    let one = |place: LocalMember| {
        let mut backend = make();
        backend.join(Box::new(place));
        let (rank, all) = backend.place();
        assert_eq!(all, members, "members of the stage that was joined");
        work(&mut Rig::new(backend, limits(32)), rank)
    };
    std::thread::scope(|scope| {
        let places = stage(members, EXCHANGED, &Abort::new()).into_iter();
        let threads: Vec<_> = places.map(|place| scope.spawn(|| one(place))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a member's thread")).collect()
    })
}

/// Sums over a stage have the bits of an addition rank by rank, on every member.
pub fn stage_sums<B: Backend>(make: &(impl Fn() -> B + Sync)) {
    for members in MEMBERS {
        let of = |rank: usize, n| scaled(30 + rank as u32, n, [1.0, 1e4, 1e-3][rank]);
        let sums = together(make, members, |rig, rank| {
            let sizes = sizes().map(|(rows, width)| {
                let mut x = rig.put_mut(&of(rank, rows * width));
                rig.backend.reduce(rows, width, &mut x);
                rig.read(&x, rows * width, format_args!("sum of {rows} rows of {width} over {members}"))
            });
            sizes.collect::<Vec<_>>()
        });
        for (rank, sums) in sums.iter().enumerate() {
            for ((rows, width), got) in sizes().zip(sums) {
                let mut want = of(0, rows * width);
                for other in 1..members {
                    want.iter_mut().zip(of(other, rows * width)).for_each(|(sum, term)| *sum += term);
                }
                let what = format_args!("sum of {rows} rows of {width} over {members} on {rank}");
                same(what, got, &want, 0.0);
            }
        }
    }
}

/// What members have is put side by side row by row, also of those that have nothing; and each finds its own again.
pub fn stage_gathers<B: Backend>(make: &(impl Fn() -> B + Sync)) {
    for widths in [&[5][..], &[1, 33], &[7, 0, 16], &[0, 300, 1], &[64, 64]] {
        together(make, widths.len(), |rig, rank| {
            ROWS.iter().for_each(|rows| gathered(rig, *rows, widths, rank));
        });
    }
}

fn gathered<B: Backend>(rig: &mut Rig<B>, rows: usize, widths: &[usize], rank: usize) {
    let what = format_args!("{rows} rows of {widths:?} put together on {rank}");
    let of = |rank: usize| noise(40 + rank as u32, rows * widths[rank]);
    let width = widths.iter().sum::<usize>();
    let parts = (0..rows).flat_map(|row| (0..widths.len()).map(move |rank| (row, rank)));
    let want = parts.flat_map(|(row, rank)| of(rank)[row * widths[rank]..][..widths[rank]].to_vec());
    let (own, mut all) = (rig.put(&of(rank)), rig.output(rows * width));
    rig.backend.all_gather(rows, widths, &own, &mut all);
    same(what, &rig.read(&all, rows * width, what), &want.collect::<Vec<_>>(), 0.0);
    if widths[rank] > 0 {
        let first = widths[..rank].iter().sum::<usize>();
        let mut back = rig.output(rows * widths[rank]);
        rig.backend.columns(rows, width, first..first + widths[rank], &all, &mut back);
        same(what, &rig.read(&back, rows * widths[rank], what), &of(rank), 0.0);
    }
}

/// When a member is gone, the others leave their operation by an unwinding that says so.
pub fn stage_given_up<B: Backend>(make: &(impl Fn() -> B + Sync)) {
    let left = together(make, 3, |rig, rank| {
        let mut x = rig.put_mut(&noise(50, 64));
        match rank {
            0 => None,
            1 => catch_unwind(AssertUnwindSafe(|| rig.backend.reduce(1, 64, &mut x))).err(),
            _ => {
                let mut all = rig.output(3 * 64);
                let widths = [64; 3];
                catch_unwind(AssertUnwindSafe(|| rig.backend.all_gather(1, &widths, &x, &mut all))).err()
            }
        }
    });
    for (rank, left) in left.into_iter().enumerate().skip(1) {
        assert!(left.is_some_and(|payload| payload.is::<Aborted>()), "member {rank} left by the wrong door");
    }
}

/// Columns are taken as they are, from any place of a row.
pub fn columns<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    for (rows, width) in sizes() {
        let x = noise(60, rows * width);
        for columns in [0..width, width / 3..width / 2 + 1, width - 1..width, 0..1] {
            let what = format_args!("columns {columns:?} of {rows} rows of {width}");
            let n = rows * columns.len();
            let (from, mut to) = (rig.put(&x), rig.output(n));
            rig.backend.columns(rows, width, columns.clone(), &from, &mut to);
            let want: Vec<f32> =
                x.chunks_exact(width).flat_map(|row| row[columns.clone()].to_vec()).collect();
            same(what, &rig.read(&to, n, what), &want, 0.0);
        }
    }
}
