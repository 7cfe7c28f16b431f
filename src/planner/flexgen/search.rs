//! The linear program for a block, and the search for the best block.
//!
//! Invariant: of blocks with the same throughput, the smallest one is found.

use super::formulas::Formulas;
use super::{Block, Fractions, Memories, OptShape, Placement, Problem, Solution};
use anyhow::{Context, Result, ensure};
use good_lp::{
    Expression, IntoAffineExpression as _, ProblemVariables, ResolutionError, Solution as _, SolverModel,
    constraint, microlp, variable,
};

/// Largest number of batches, and of sequences of a batch, that are searched.
const BATCHES_MAX: usize = 1 << 16;

/// Relative difference of throughputs below which they count as the same.
const ROUNDING: f64 = 1e-9;

impl Problem {
    /// Finds the placement with the highest throughput for a block. `None` if nothing fits into the memories,
    /// or a given placement has activations on the disk. Fails if the fractions of a given placement do not
    /// add up to 1, or the solver does.
    pub fn solve(&self, block: Block) -> Result<Option<Solution>> {
        self.placement.map_or(Ok(()), Placement::check)?;
        if self.placement.is_some_and(|given| given.hidden.disk > Fractions::TOLERANCE) {
            return Ok(None);
        }
        let mut variables = ProblemVariables::new();
        let formulas = Formulas::new(&mut variables, self, block);
        let [prefill, decode] = [(); 2].map(|()| variables.add(variable().min(0.0)));
        let OptShape { layers, .. } = self.shape;
        let steps = self.lengths.output - 1.0;
        let seconds = layers * prefill + layers * steps * decode;
        self.check(&formulas)?;
        let mut program = variables.minimise(seconds / formulas.block).using(microlp);
        for time in formulas.prefill_times(&self.rates) {
            program.add_constraint(constraint!(prefill >= time));
        }
        for time in formulas.decode_times(&self.rates) {
            program.add_constraint(constraint!(decode >= time));
        }
        for shares in [&formulas.weights, &formulas.cache, &formulas.hidden].iter().filter(|of| !of.is_fixed)
        {
            program.add_constraint(constraint!(shares.disk() >= 0));
        }
        let Memories { gpu, host, disk, usable } = self.memories;
        let gpu_memory = formulas.gpu_memory().map(|memory| (memory, gpu));
        let host_memory = formulas.host_memory().map(|memory| (memory, host));
        let all = gpu_memory.into_iter().chain(host_memory).chain([(formulas.disk_space(), disk)]);
        for (needed, memory) in all {
            // In parts of the memory, because the solver needs numbers of about the same size.
            program.add_constraint(match memory > 0.0 {
                true => constraint!(needed / memory <= usable),
                false => constraint!(needed <= 0),
            });
        }
        let found = match program.solve() {
            Ok(found) => found,
            Err(ResolutionError::Infeasible) => return Ok(None),
            Err(error) => return Err(error).context("the linear program of the placement"),
        };
        let prefill_seconds = layers * found.value(prefill);
        let decode_seconds = layers * steps * found.value(decode);
        Ok(Some(Solution {
            block,
            placement: Placement {
                weights: formulas.weights.values(&found),
                cache: formulas.cache.values(&found),
                hidden: formulas.hidden.values(&found),
            },
            prefill_seconds,
            decode_seconds,
            throughput: formulas.block * self.lengths.output / (prefill_seconds + decode_seconds),
            gpu_peaks: formulas.gpu_memory().map(|memory| memory.eval_with(&found)),
        }))
    }

    /// Fails for what the solver does not take.
    fn check(&self, formulas: &Formulas) -> Result<()> {
        let Memories { gpu, host, disk, usable } = self.memories;
        let sizes = [gpu, host, disk, usable];
        ensure!(sizes.iter().all(|size| *size >= 0.0), "the sizes of memories must not be negative");
        let is_finite = |times: &Expression| {
            times.constant().is_finite() && times.linear_coefficients().all(|(_, factor)| factor.is_finite())
        };
        let (prefill, decode) = (formulas.prefill_times(&self.rates), formulas.decode_times(&self.rates));
        ensure!(prefill.iter().chain(&decode).all(is_finite), "rates must be positive and finite");
        Ok(())
    }

    /// Returns the largest number of batches that fit, of `batch` sequences each, up to [`BATCHES_MAX`]; 0 if
    /// not even one does. Doubles it until nothing fits, and bisects then, as the paper's search does. Fails
    /// as [`Self::solve`] does.
    pub fn max_batches(&self, batch: usize) -> Result<usize> {
        let fits = |batches| anyhow::Ok(self.solve(Block { batch, batches })?.is_some());
        let mut above = 1;
        while above <= BATCHES_MAX && fits(above)? {
            above *= 2;
        }
        let mut largest = above / 2;
        while largest + 1 < above.min(BATCHES_MAX) {
            let middle = largest.midpoint(above);
            if fits(middle)? { largest = middle } else { above = middle }
        }
        Ok(largest)
    }

    /// Searches the block with the highest throughput as the paper does: for sizes of a batch of 1, 2, 3 and
    /// 4, and then doubled, as long as one batch fits, the number of batches grows until the throughput
    /// falls. Fails as [`Self::solve`] does.
    pub fn search(&self) -> Result<Option<Solution>> {
        let sizes = [1, 2, 3].into_iter().chain((2..=BATCHES_MAX.ilog2()).map(|power| 1 << power));
        let mut best: Option<Solution> = None;
        for batch in sizes {
            let bound = self.max_batches(batch)?;
            if bound == 0 {
                break;
            }
            let mut last = 0.0;
            for batches in 1..=bound {
                let Some(found) = self.solve(Block { batch, batches })? else { break };
                // The solver is not exact.
                if found.throughput < (1.0 - ROUNDING) * last {
                    break;
                }
                last = found.throughput;
                // Of equal ones, the smallest block.
                if best.is_none_or(|best| found.throughput > (1.0 + ROUNDING) * best.throughput) {
                    best = Some(found);
                }
            }
        }
        Ok(best)
    }
}
