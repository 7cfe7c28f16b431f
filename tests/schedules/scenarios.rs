//! Scenarios of the kernels: late inputs, the exchange between ranks, and the pool of worker threads.

use crate::collective::local::{LocalRank, create_ranks};
use crate::late::LateInputs;
use crate::pool::ThreadPool;
use crate::schedules::draw;
use crate::{Abort, Aborted, Collective, HostRow};
use core::sync::atomic::{AtomicUsize, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, mpsc};
use std::thread::{JoinHandle, spawn};

/// Every wait for a late input ends, with the input or with the drop of its sender.
pub fn every_late_input_wakes_its_row() {
    let inputs: Arc<LateInputs> = Arc::default();
    let (sent, dropped) = (inputs.mask_sender(0), inputs.mask_sender(1));
    let (to_sampler, rows) = mpsc::channel();
    inputs.draw_with(2, move |row, sender| {
        let _ = to_sampler.send((row.logits.len(), sender));
    });
    inputs.draw_with(3, |_, sender| drop(sender));
    let masks = spawn(move || {
        sent.send([5].into());
        drop(dropped);
    });
    let sampler = spawn(move || {
        let (logits, sender) = rows.recv().expect("the draw has begun");
        sender.send(logits as u32);
    });
    [2, 3].iter().for_each(|row| inputs.begin_draw(*row, HostRow::of_logits(&[0.5; 4])));
    let mut words = [0];
    assert_eq!((inputs.wait_mask(0, &mut words), words), (Ok(true), [5]));
    assert_eq!(inputs.wait_mask(1, &mut words), Ok(false), "only the row of the dropped sender fails");
    assert_eq!([2, 3].map(|row| inputs.wait_token(row)), [Ok(Some(4)), Ok(None)]);
    join([masks, sampler]);
}

/// An abort ends present and later waits for late inputs, whatever their senders do.
pub fn an_abort_ends_every_wait_for_late_inputs() {
    let inputs: Arc<LateInputs> = Arc::default();
    let (kept, sent) = (inputs.mask_sender(0), inputs.mask_sender(1));
    let waiters = [0, 1].map(|row| {
        let inputs = inputs.clone();
        spawn(move || inputs.wait_mask(row, &mut [0]))
    });
    let other = inputs.clone();
    let host = spawn(move || sent.send([1].into()));
    let aborter = spawn(move || other.abort());
    let [first, second] = join(waiters);
    assert_eq!(first, Err(Aborted));
    assert!(matches!(second, Ok(true) | Err(Aborted)));
    join([host, aborter]);
    drop(kept);
    assert_eq!(inputs.wait_mask(1, &mut [0]), Err(Aborted));
}

/// Operations of several rounds give every rank the sums and columns of all, in rank order.
pub fn ranks_exchange_what_each_contributes() {
    const RANKS: usize = 3;
    let sums = join_ranks(create_ranks(RANKS, 2, &Abort::new()), |mut local| {
        let own = (local.rank() + 1) as f32;
        let (mut x, mut all) = ([own, 10.0 * own, 100.0 * own], [0.0; RANKS]);
        local.all_reduce(&mut x)?;
        local.all_gather(1, &[1; RANKS], &[own], &mut all)?;
        local.all_reduce(&mut x[..1])?;
        Ok::<_, Aborted>((x, all))
    });
    assert_eq!(sums, [Ok(([18.0, 60.0, 600.0], [1.0, 2.0, 3.0])); RANKS]);
}

/// An abort from outside wakes ranks that wait for one which never arrives.
pub fn an_abort_wakes_every_rank() {
    let abort = Abort::new();
    let mut ranks = create_ranks(3, 2, &abort);
    let missing = ranks.swap_remove(draw(3));
    let outside = spawn(move || abort.abort());
    let ends = join_ranks(ranks, |mut local| {
        let ended = local.all_reduce(&mut [1.0; 3]);
        (ended, local.all_gather(1, &[1; 3], &[1.0], &mut [0.0; 3]))
    });
    assert_eq!(ends, [(Err(Aborted), Err(Aborted)); 2]);
    join([outside]);
    drop(missing);
}

/// The other ranks complete the operations that a dropped rank took part in, and no later one.
pub fn no_rank_waits_for_a_dropped_one() {
    let (faulty, operations) = (draw(3), draw(3));
    let done = join_ranks(create_ranks(3, 2, &Abort::new()), move |mut local| {
        if local.rank() == faulty {
            return (0..operations).take_while(|_| local.all_reduce(&mut [1.0]).is_ok()).count();
        }
        (0..4).take_while(|_| local.all_reduce(&mut [1.0]).is_ok()).count()
    });
    assert_eq!(done, [operations; 3]);
}

/// Each item of each job runs once, and jobs are over when `run` returns, also by a panic.
pub fn a_pool_runs_every_item_once() {
    let mut pool = ThreadPool::new(0, 3).expect("threads can be created");
    let bad = draw(4);
    for items in [3, 2, 4] {
        let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
        let ended = catch_unwind(AssertUnwindSafe(|| {
            pool.run(items, |worker, item| {
                assert!(worker < 3);
                counts[item].fetch_add(1, Ordering::Relaxed);
                if items == 4 && item == bad {
                    resume_unwind(Box::new(()));
                }
            });
        }));
        assert_eq!(ended.is_err(), items == 4);
        let counts: Vec<usize> = counts.into_iter().map(AtomicUsize::into_inner).collect();
        assert_eq!(counts, vec![1; items]);
    }
}

/// Runs each rank on its own thread, and returns the results.
fn join_ranks<T: Send + 'static>(
    ranks: Vec<LocalRank>,
    work: impl Fn(LocalRank) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let spawned = ranks.into_iter().map(|rank| {
        let work = work.clone();
        spawn(move || work(rank))
    });
    let threads: Vec<_> = spawned.collect();
    threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
}

/// Waits for the threads, and returns their results.
pub(crate) fn join<T, const N: usize>(threads: [JoinHandle<T>; N]) -> [T; N] {
    threads.map(|thread| thread.join().expect("no thread panics"))
}
