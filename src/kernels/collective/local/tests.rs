use super::*;
use crate::random::philox;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::thread;

/// Numbers that follow from a seed.
struct Dice(u32, u32);

impl Dice {
    fn roll(&mut self) -> u32 {
        self.1 += 1;
        philox([self.1, 0, 0, 0], [self.0, 7])[0]
    }

    fn below(&mut self, end: usize) -> usize {
        self.roll() as usize % end
    }

    /// Of sizes so different that any other order of summation gives other bits.
    fn float(&mut self) -> f32 {
        let (sign, exponent) = ([1.0, -1.0][self.below(2)], self.below(60) as i32 - 30);
        sign * (1.0 + self.roll() as f32 / u32::MAX as f32) * 2f32.powi(exponent)
    }

    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }
}

/// Runs each member on a thread of its own.
fn on_threads<T: Send>(members: Vec<LocalMember>, work: impl Fn(LocalMember) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let threads: Vec<_> = members.into_iter().map(|member| scope.spawn(|| work(member))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no test fails on a thread")).collect()
    })
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn sums_are_those_of_the_ranks_in_order_bit_for_bit() {
    for members in 1..5 {
        let floats = 16;
        let lens: Vec<usize> = (0..2000).map(|round| Dice(round, 0).below(3 * floats + 2)).collect();
        let given =
            |rank: usize, round: usize| Dice(rank as u32 * 10_000 + round as u32, 9).floats(lens[round]);
        let sums = on_threads(stage(members, floats, &Abort::new()), |mut member| {
            let mut dice = Dice(member.rank as u32, 0);
            (0..lens.len())
                .map(|round| {
                    // Who comes first differs from round to round; sometimes the others have gone to sleep.
                    for _ in 0..dice.below(40) * dice.below(40) {
                        std::hint::spin_loop();
                    }
                    let mut x = given(member.rank, round);
                    member.sum(&mut x).map(|()| bits(&x))
                })
                .collect::<Vec<_>>()
        });
        for round in 0..lens.len() {
            let mut expected = given(0, round);
            for rank in 1..members {
                expected.iter_mut().zip(given(rank, round)).for_each(|(sum, part)| *sum += part);
            }
            for sum in &sums {
                assert_eq!(sum[round], Ok(bits(&expected)), "{members} members, round {round}");
            }
        }
    }
}

/// The sum of these in another order is 0 or 2^-20, and the sign of a lone zero is that of rank 0.
#[test]
fn the_order_is_that_of_the_ranks_and_not_of_arrival() {
    let parts: [[f32; 2]; 4] = [[1e30, -0.0], [2f32.powi(-20), -0.0], [-1e30, -0.0], [1.0, -0.0]];
    for late in 0..4 {
        let sums = on_threads(stage(4, 8, &Abort::new()), |mut member| {
            if member.rank == late {
                while member.stage.arrived.load(Ordering::SeqCst) < 3 {
                    thread::yield_now();
                }
            }
            let mut x = parts[member.rank];
            member.sum(&mut x).map(|()| x.map(f32::to_bits))
        });
        assert_eq!(sums, [Ok([1f32.to_bits(), (-0f32).to_bits()]); 4], "rank {late} comes last");
    }
}

#[test]
fn columns_stand_side_by_side_by_rank_whatever_the_pieces() {
    for seed in 0..60 {
        let mut dice = Dice(seed, 0);
        let (members, rows, floats) = (1 + dice.below(4), dice.below(8), 1 + dice.below(20));
        let widths: Vec<usize> = (0..members).map(|_| dice.below(9)).collect();
        let total: usize = widths.iter().sum();
        // Not even numbers that are none become others on the way.
        let value = |rank: usize, row: usize, column: usize| {
            f32::from_bits(0x7fa0_0000 + (rank * 10_000 + row * 100 + column) as u32)
        };
        let mut expected = Vec::new();
        for row in 0..rows {
            for (rank, width) in widths.iter().enumerate() {
                expected.extend((0..*width).map(|column| value(rank, row, column)));
            }
        }
        let gathered = on_threads(stage(members, floats, &Abort::new()), |mut member| {
            let (rank, width) = (member.rank, widths[member.rank]);
            let own: Vec<f32> = (0..rows * width).map(|at| value(rank, at / width, at % width)).collect();
            let mut all = vec![f32::NAN; rows * total];
            // Twice, and a sum between: whoever comes too early must not see the other turn's boxes.
            let mut one = [1.0];
            let done = member.gather(rows, &widths, &own, &mut all);
            done.and_then(|()| member.sum(&mut one))
                .and_then(|()| member.gather(rows, &widths, &own, &mut all))
                .map(|()| (one[0], bits(&all)))
        });
        for all in gathered {
            assert_eq!(all, Ok((members as f32, bits(&expected))), "seed {seed}");
        }
    }
}

/// Members wait in an operation that one of them never comes to; from outside comes the abort.
#[test]
fn an_abort_wakes_who_waits_and_stops_who_comes_later() {
    for round in 0..2000 {
        let abort = Abort::new();
        let mut dice = Dice(round, 0);
        let (members, other) = (2 + dice.below(3), 1 + dice.below(3));
        let (missing, full) = (dice.below(members), dice.below(4));
        let mut stages = stage(members, 4, &abort);
        stages.extend(stage(other, 4, &abort));
        let (outside, pause) = (abort.clone(), dice.below(3000));
        thread::scope(|scope| {
            scope.spawn(move || {
                (0..pause).for_each(|_| std::hint::spin_loop());
                outside.abort();
            });
            let ends = on_threads(stages, |mut member| {
                let first_stage = member.members() == members;
                let rounds = if first_stage && member.rank == missing { full } else { usize::MAX };
                let ended = (0..rounds).find(|_| member.sum(&mut [1.0; 9]).is_err());
                while !member.stage.abort.is_aborted() {
                    thread::yield_now();
                }
                let later = member.gather(1, &vec![1; member.members()], &[1.0], &mut [0.0; 8]);
                (ended.is_some() || rounds == full, later)
            });
            assert!(ends.iter().all(|(ended, later)| *ended && *later == Err(Aborted)), "round {round}");
        });
    }
}

/// A member whose thread unwinds is dropped while the others wait for it.
#[test]
fn nobody_waits_for_a_member_that_is_gone() {
    for round in 0..2000 {
        let mut dice = Dice(round, 3);
        let members = 2 + dice.below(3);
        let (faulty, at) = (dice.below(members), dice.below(5));
        let done = on_threads(stage(members, 4, &Abort::new()), |mut member| {
            if member.rank == faulty {
                let dies = catch_unwind(AssertUnwindSafe(move || {
                    (0..at).for_each(|_| member.sum(&mut [1.0]).expect("all are there"));
                    std::panic::resume_unwind(Box::new(()));
                }));
                assert!(dies.is_err());
                return at;
            }
            let done = (0..).take_while(|_| member.sum(&mut [1.0]).is_ok()).count();
            assert_eq!(member.sum(&mut [1.0]), Err(Aborted));
            done
        });
        // What was met for is done: nobody is one operation behind the others.
        assert_eq!(done, vec![at; members], "round {round}");
    }
}

/// And who was in that operation when it unwound is in no other, though all are still there.
#[test]
fn members_that_do_not_do_the_same_are_found_out() {
    let everybody = Barrier::new(2);
    let outcomes = on_threads(stage(2, 8, &Abort::new()), |mut member| {
        let unwinds = catch_unwind(AssertUnwindSafe(|| member.sum(&mut vec![1.0; 3 + member.rank]))).is_err();
        everybody.wait();
        let later = (member.sum(&mut [1.0]), member.gather(1, &[1, 1], &[1.0], &mut [0.0; 2]));
        everybody.wait();
        (unwinds, later)
    });
    assert_eq!(outcomes, [(true, (Err(Aborted), Err(Aborted))); 2]);
}
