use super::*;
use crate::random::philox;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::thread;

/// A deterministic random number generator.
struct Dice(u32, u32);

impl Dice {
    fn roll(&mut self) -> u32 {
        self.1 += 1;
        philox([self.1, 0, 0, 0], [self.0, 7])[0]
    }

    fn below(&mut self, end: usize) -> usize {
        self.roll() as usize % end
    }

    /// Returns a number of widely varying magnitude, so that any other order of summation gives different
    /// bits.
    fn float(&mut self) -> f32 {
        let (sign, exponent) = ([1.0, -1.0][self.below(2)], self.below(60) as i32 - 30);
        sign * (1.0 + self.roll() as f32 / u32::MAX as f32) * 2f32.powi(exponent)
    }

    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }
}

/// Runs each rank on its own thread.
fn on_threads<T: Send>(ranks: Vec<LocalRank>, work: impl Fn(LocalRank) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    })
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn sums_are_added_in_rank_order_bit_for_bit() {
    for ranks in 1..5 {
        let floats = 16;
        let lens: Vec<usize> = (0..2000).map(|round| Dice(round, 0).below(3 * floats + 2)).collect();
        let given =
            |rank: usize, round: usize| Dice(rank as u32 * 10_000 + round as u32, 9).floats(lens[round]);
        let sums = on_threads(create_ranks(ranks, floats, &Abort::new()), |mut local| {
            let mut dice = Dice(local.rank as u32, 0);
            (0..lens.len())
                .map(|round| {
                    // The order of arrival varies from round to round; sometimes the other ranks have gone to
                    // sleep.
                    for _ in 0..dice.below(40) * dice.below(40) {
                        std::hint::spin_loop();
                    }
                    let mut x = given(local.rank, round);
                    local.all_reduce(&mut x).map(|()| bits(&x))
                })
                .collect::<Vec<_>>()
        });
        for round in 0..lens.len() {
            let mut expected = given(0, round);
            for rank in 1..ranks {
                expected.iter_mut().zip(given(rank, round)).for_each(|(sum, part)| *sum += part);
            }
            for sum in &sums {
                assert_eq!(sum[round], Ok(bits(&expected)), "{ranks} ranks, round {round}");
            }
        }
    }
}

/// In any other order, the sum is 0 or 2^-20. The sign of a lone zero is that of rank 0.
#[test]
fn the_order_of_addition_is_independent_of_arrival() {
    let parts: [[f32; 2]; 4] = [[1e30, -0.0], [2f32.powi(-20), -0.0], [-1e30, -0.0], [1.0, -0.0]];
    for late in 0..4 {
        let sums = on_threads(create_ranks(4, 8, &Abort::new()), |mut local| {
            if local.rank == late {
                while local.stage.arrived.load(Ordering::SeqCst) < 3 {
                    thread::yield_now();
                }
            }
            let mut x = parts[local.rank];
            local.all_reduce(&mut x).map(|()| x.map(f32::to_bits))
        });
        assert_eq!(sums, [Ok([1f32.to_bits(), (-0f32).to_bits()]); 4], "rank {late} comes last");
    }
}

#[test]
fn columns_are_gathered_in_rank_order_for_any_buffer_size() {
    for seed in 0..60 {
        let mut dice = Dice(seed, 0);
        let (ranks, rows, floats) = (1 + dice.below(4), dice.below(8), 1 + dice.below(20));
        let widths: Vec<usize> = (0..ranks).map(|_| dice.below(9)).collect();
        let total: usize = widths.iter().sum();
        // Gathering preserves the bits of a NaN.
        let value = |rank: usize, row: usize, column: usize| {
            f32::from_bits(0x7fa0_0000 + (rank * 10_000 + row * 100 + column) as u32)
        };
        let mut expected = Vec::new();
        for row in 0..rows {
            for (rank, width) in widths.iter().enumerate() {
                expected.extend((0..*width).map(|column| value(rank, row, column)));
            }
        }
        let gathered = on_threads(create_ranks(ranks, floats, &Abort::new()), |mut local| {
            let (rank, width) = (local.rank, widths[local.rank]);
            let own: Vec<f32> = (0..rows * width).map(|at| value(rank, at / width, at % width)).collect();
            let mut all = vec![f32::NAN; rows * total];
            // Gathers twice, with a sum in between: a rank that is early must not see the buffers of the
            // other parity.
            let mut one = [1.0];
            let done = local.all_gather(rows, &widths, &own, &mut all);
            done.and_then(|()| local.all_reduce(&mut one))
                .and_then(|()| local.all_gather(rows, &widths, &own, &mut all))
                .map(|()| (one[0], bits(&all)))
        });
        for all in gathered {
            assert_eq!(all, Ok((ranks as f32, bits(&expected))), "seed {seed}");
        }
    }
}

/// Ranks wait in an operation that one of them never joins; the abort comes from outside.
#[test]
fn an_abort_wakes_waiting_ranks_and_fails_later_operations() {
    for round in 0..2000 {
        let abort = Abort::new();
        let mut dice = Dice(round, 0);
        let (ranks, other) = (2 + dice.below(3), 1 + dice.below(3));
        let (missing, full) = (dice.below(ranks), dice.below(4));
        let mut stages = create_ranks(ranks, 4, &abort);
        stages.extend(create_ranks(other, 4, &abort));
        let (outside, pause) = (abort.clone(), dice.below(3000));
        thread::scope(|scope| {
            scope.spawn(move || {
                (0..pause).for_each(|_| std::hint::spin_loop());
                outside.abort();
            });
            let ends = on_threads(stages, |mut local| {
                let first_stage = local.rank_count() == ranks;
                let rounds = if first_stage && local.rank == missing { full } else { usize::MAX };
                let ended = (0..rounds).find(|_| local.all_reduce(&mut [1.0; 9]).is_err());
                while !local.stage.abort.is_aborted() {
                    thread::yield_now();
                }
                let later = local.all_gather(1, &vec![1; local.rank_count()], &[1.0], &mut [0.0; 8]);
                (ended.is_some() || rounds == full, later)
            });
            assert!(ends.iter().all(|(ended, later)| *ended && *later == Err(Aborted)), "round {round}");
        });
    }
}

/// A rank whose thread unwinds is dropped while the others wait for it.
#[test]
fn no_rank_waits_for_a_dropped_rank() {
    for round in 0..2000 {
        let mut dice = Dice(round, 3);
        let ranks = 2 + dice.below(3);
        let (faulty, at) = (dice.below(ranks), dice.below(5));
        let done = on_threads(create_ranks(ranks, 4, &Abort::new()), |mut local| {
            if local.rank == faulty {
                let dies = catch_unwind(AssertUnwindSafe(move || {
                    (0..at).for_each(|_| local.all_reduce(&mut [1.0]).expect("all ranks are running"));
                    std::panic::resume_unwind(Box::new(()));
                }));
                assert!(dies.is_err());
                return at;
            }
            let done = (0..).take_while(|_| local.all_reduce(&mut [1.0]).is_ok()).count();
            assert_eq!(local.all_reduce(&mut [1.0]), Err(Aborted));
            done
        });
        // All complete the barriers that the dropped rank arrived at: none is an operation behind.
        assert_eq!(done, vec![at; ranks], "round {round}");
    }
}

/// A rank that unwound out of such an operation starts no other one, although all ranks still exist.
#[test]
fn ranks_with_different_sizes_panic() {
    let everybody = Barrier::new(2);
    let outcomes = on_threads(create_ranks(2, 8, &Abort::new()), |mut local| {
        let unwinds =
            catch_unwind(AssertUnwindSafe(|| local.all_reduce(&mut vec![1.0; 3 + local.rank]))).is_err();
        everybody.wait();
        let later = (local.all_reduce(&mut [1.0]), local.all_gather(1, &[1, 1], &[1.0], &mut [0.0; 2]));
        everybody.wait();
        (unwinds, later)
    });
    assert_eq!(outcomes, [(true, (Err(Aborted), Err(Aborted))); 2]);
}
