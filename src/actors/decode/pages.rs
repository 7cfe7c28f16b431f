//! The pages of running sequences: what the KV manager is told of them, and what its plan takes and gives.
//!
//! Invariant: a sequence has pages for all positions of a step before the step is sent.

use super::DecodeLoop;
use super::running::RunningSequence;
use crate::actors::kv::SlotPlan;
use crate::actors::prefill::Requeue;

impl DecodeLoop {
    /// Adds to the next update what the KV manager must know of the running sequences: what is in their
    /// pages, and the pages that they need.
    pub(super) fn report_sequences(&mut self) {
        let page_positions = self.config.limits.page_positions;
        for running in &mut self.running {
            self.update.computed.extend(running.report_filled(page_positions));
            if running.is_decoding() {
                self.update.grown.extend(running.growth(page_positions));
            }
            let has_work = running.is_decoding() || running.chunk.is_some();
            self.update.with_work += usize::from(has_work && !running.is_beam);
        }
        self.update.with_work += self.searches.len();
    }

    /// Removes preempted sequences, and gives the others their slots.
    pub(super) fn apply_plan(&mut self, plan: &SlotPlan) {
        let preempted = self.running.extract_if(.., |running| plan.preempted.contains(&running.key));
        let (beams, others): (Vec<_>, Vec<_>) = preempted.partition(|running| running.is_beam);
        beams.into_iter().for_each(|beam| self.requeue_search(beam.key));
        // The client has, or gets, all tokens so far: they are kept, and those in flight are waited for.
        self.leaving.extend(others);
        self.let_go();
        self.reorder(&plan.slots);
        let page_positions = self.config.limits.page_positions;
        for running in &mut self.running {
            running.is_stalled = plan.stalled.contains(&running.key);
        }
        self.stall_whole_searches();
        for running in &mut self.running {
            if running.is_decoding() && !running.is_stalled {
                let next = running.next_position() as usize;
                running.pages = running.pages.max(next.div_ceil(page_positions));
                if plan.short_of_drafts.contains(&running.key) {
                    running.limit_drafts(running.pages * page_positions - next);
                }
                running.pages = running.pages.max((next + running.depth()).div_ceil(page_positions));
            }
        }
        self.show_sequences(plan);
    }

    /// Shows the running sequences to those who watch the lane.
    pub(super) fn show_sequences(&self, plan: &SlotPlan) {
        let sequences = self.running.iter().map(RunningSequence::live);
        self.handles.live.show(self.lane, plan.window.clone(), sequences);
    }

    /// Drops the sequences that have all their results and ended, and hands preempted ones back to prefill.
    pub(super) fn let_go(&mut self) {
        for leaving in self.leaving.extract_if(.., |leaving| leaving.awaited == 0) {
            if !leaving.finished {
                assert!(
                    !leaving.ends_with_scheduled(),
                    "a sequence leaves with its last step; anything else is a bug"
                );
                self.handles.requeue.do_send(Requeue(leaving.suspend()));
            }
        }
    }
}
