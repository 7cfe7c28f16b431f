//! Prefill: describes the work on prompts, and obtains the pages for it.
//!
//! Owns the admitted requests whose prompts are not through. Never issues device work: decode pulls.
//! Invariant: first in, first out. A request short of pages holds back those behind it.

use super::intake::Admit;
use super::kv::{Reserve, Returned};
use super::sequence::{Key, Sequence};
use super::stream::EventSender;
use crate::config::Policy;
use actix::{
    Actor, ActorFutureExt, AsyncContext, Context, Handler, Message, Recipient, ResponseFuture, SpawnHandle,
    WrapFuture,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// Asks for the next step's prompt chunks.
#[derive(Message)]
#[rtype(result = "Vec<Chunk>")]
pub struct NextChunk {
    /// Tokens of all chunks together, at most.
    pub budget: usize,
    /// Sequences in decode's hands. With none, the answer is held until there is work.
    pub live: usize,
}

/// A run of a prompt's tokens to be computed in the next step.
pub struct Chunk {
    pub key: Key,
    /// The sequence itself comes with its first chunk.
    pub sequence: Option<Box<Sequence>>,
    /// Position of the first token.
    pub start: usize,
    pub len: usize,
    /// The prompt ends with this chunk.
    pub last: bool,
}

/// The device lost everything: chunks of sequences that had begun will not follow.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ForgetBegun;

/// A prompt with its pages, and how far it has come.
struct Prompt {
    key: Key,
    /// Until the first chunk goes out.
    sequence: Option<Box<Sequence>>,
    tokens: Arc<[u32]>,
    done: usize,
    events: EventSender,
    ready: Instant,
}

/// The actor.
pub struct Prefill {
    kv: Recipient<Reserve>,
    returned: Recipient<Returned>,
    prompts: VecDeque<Prompt>,
    /// Leading prompts that may be computed; all of them but under [`Policy::Window`].
    released: usize,
    policy: Policy,
    slots: usize,
    /// A question waiting for work.
    held: Option<(NextChunk, oneshot::Sender<Vec<Chunk>>)>,
    /// Set while a window is open.
    timer: Option<SpawnHandle>,
}

impl Actor for Prefill {
    type Context = Context<Prefill>;
}

impl Handler<Admit> for Prefill {
    type Result = ();

    fn handle(&mut self, Admit(mut sequence): Admit, ctx: &mut Self::Context) {
        let reserve = Reserve { positions: sequence.positions(), client: sequence.events.clone() };
        let reply = self.kv.send(reserve).into_actor(self).map(move |lease, act, ctx| {
            if let Ok(Some(lease)) = lease {
                sequence.lease = Some(lease);
                act.enqueue(sequence);
                act.answer_held(ctx);
            }
        });
        ctx.spawn(reply);
    }
}

impl Handler<NextChunk> for Prefill {
    type Result = ResponseFuture<Vec<Chunk>>;

    fn handle(&mut self, msg: NextChunk, ctx: &mut Self::Context) -> Self::Result {
        let (tx, rx) = oneshot::channel();
        self.held = Some((msg, tx));
        self.answer_held(ctx);
        Box::pin(async { rx.await.unwrap_or_default() })
    }
}

impl Handler<ForgetBegun> for Prefill {
    type Result = ();

    fn handle(&mut self, _: ForgetBegun, _: &mut Self::Context) {
        self.keep(|prompt| prompt.sequence.is_some());
    }
}

impl Prefill {
    /// A prefill with nothing to do.
    pub fn new(
        kv: Recipient<Reserve>,
        returned: Recipient<Returned>,
        policy: Policy,
        slots: usize,
    ) -> Prefill {
        Prefill {
            kv,
            returned,
            prompts: VecDeque::new(),
            released: 0,
            policy,
            slots,
            held: None,
            timer: None,
        }
    }

    /// Puts a sequence behind those that arrived before it.
    fn enqueue(&mut self, sequence: Box<Sequence>) {
        let key = sequence.key;
        let prompt = Prompt {
            key,
            tokens: sequence.request.prompt.clone(),
            done: 0,
            events: sequence.events.clone(),
            ready: Instant::now(),
            sequence: Some(sequence),
        };
        let place = self.prompts.partition_point(|other| other.key < key);
        self.prompts.insert(place.max(self.released), prompt);
    }

    /// Answers the question at hand, unless nothing lives and nothing is to be done.
    fn answer_held(&mut self, ctx: &mut Context<Prefill>) {
        let Some((question, _)) = &self.held else { return };
        let (budget, live) = (question.budget, question.live);
        self.drop_gone();
        self.release(live, ctx);
        let chunks = self.chunks(budget);
        if (live > 0 || !chunks.is_empty())
            && let Some((_, reply)) = self.held.take()
        {
            // Decode waits for it; if it is gone, the sequences go home with the answer.
            let _ = reply.send(chunks);
        }
    }

    /// Chunks of the released prompts, oldest first, `budget` tokens at most.
    fn chunks(&mut self, mut budget: usize) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        while budget > 0 && self.released > 0 {
            let prompt = &mut self.prompts[0];
            let (start, left) = (prompt.done, prompt.tokens.len() - prompt.done);
            let len = left.min(budget);
            let last = len == left;
            chunks.push(Chunk { key: prompt.key, sequence: prompt.sequence.take(), start, len, last });
            prompt.done += len;
            budget -= len;
            if last {
                self.prompts.pop_front();
                self.released -= 1;
            }
        }
        chunks
    }

    /// Decides which prompts may be computed. Under [`Policy::Window`] that is a whole batch at a time:
    /// when the one before is through, and the window since the oldest arrival is over or no more fit.
    fn release(&mut self, live: usize, ctx: &mut Context<Prefill>) {
        let Policy::Window { window } = self.policy else {
            self.released = self.prompts.len();
            return;
        };
        let Some(oldest) = self.prompts.front() else { return };
        if live > 0 || self.released > 0 {
            return;
        }
        let waited = oldest.ready.elapsed();
        if waited >= window || self.prompts.len() >= self.slots {
            self.released = self.prompts.len();
        } else if self.timer.is_none() {
            self.timer = Some(ctx.run_later(window - waited, |act, ctx| {
                act.timer = None;
                act.answer_held(ctx);
            }));
        }
    }

    /// Whoever hung up is not computed any further.
    fn drop_gone(&mut self) {
        let before = self.prompts.len();
        self.keep(|prompt| !prompt.events.is_closed());
        if self.prompts.len() < before {
            self.returned.do_send(Returned);
        }
    }

    /// Drops the prompts that `wanted` does not want, and keeps count of the released.
    fn keep(&mut self, wanted: impl Fn(&Prompt) -> bool) {
        let dropped = self.prompts.iter().take(self.released).filter(|prompt| !wanted(prompt)).count();
        self.released -= dropped;
        self.prompts.retain(wanted);
    }
}

#[cfg(test)]
mod tests {
    use super::super::intake::Released;
    use super::super::stream::TokenStream;
    use super::super::testing::{ear, next, request, sequence, within};
    use super::*;
    use crate::memory::{Lease, PagePool};
    use actix::{Addr, MessageResult};
    use std::time::Duration;
    use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

    const HOUR: Duration = Duration::from_secs(3600);
    const POSITIONS: usize = 32;
    /// More than all prompts of a test have.
    const PLENTY: usize = 1000;

    /// A wish for pages, and the way to grant it.
    type Wish = (Reserve, oneshot::Sender<Option<Lease>>);

    /// A kv that leaves every answer to the test.
    struct FakeKv(UnboundedSender<Wish>);

    impl Actor for FakeKv {
        type Context = Context<FakeKv>;
    }

    impl Handler<Reserve> for FakeKv {
        type Result = ResponseFuture<Option<Lease>>;

        fn handle(&mut self, wish: Reserve, _: &mut Self::Context) -> Self::Result {
            let (reply, answer) = oneshot::channel();
            let _ = self.0.send((wish, reply));
            Box::pin(async { answer.await.unwrap_or_default() })
        }
    }

    /// Asks how many prompts there are, how many of them are released, and whether a question is held.
    #[derive(Message)]
    #[rtype(result = "(usize, usize, bool)")]
    struct Peek;

    impl Handler<Peek> for Prefill {
        type Result = MessageResult<Peek>;

        fn handle(&mut self, _: Peek, _: &mut Self::Context) -> Self::Result {
            MessageResult((self.prompts.len(), self.released, self.held.is_some()))
        }
    }

    /// A prefill with the test in the place of all its neighbours.
    struct Rig {
        prefill: Addr<Prefill>,
        wishes: UnboundedReceiver<Wish>,
        returned: UnboundedReceiver<Returned>,
        home: Recipient<Released>,
        permits: UnboundedReceiver<Released>,
        pool: PagePool,
    }

    impl Rig {
        fn new(policy: Policy, slots: usize) -> Rig {
            let (wishes_tx, wishes) = unbounded_channel();
            let (returned_to, returned) = ear();
            let (home, permits) = ear();
            let kv = FakeKv(wishes_tx).start().recipient();
            let prefill = Prefill::new(kv, returned_to, policy, slots).start();
            let pool = PagePool::new(100, POSITIONS);
            Rig { prefill, wishes, returned, home, permits, pool }
        }

        /// Admits a request without granting its pages.
        async fn admit(&mut self, key: u64, len: usize) -> (Wish, TokenStream) {
            let (sequence, stream) = sequence(key, request(len, 4), self.home.clone());
            self.prefill.do_send(Admit(sequence));
            let wish = next(&mut self.wishes).await;
            assert_eq!(wish.0.positions, len + 4, "pages are asked for prompt and answer");
            (wish, stream)
        }

        fn grant(&mut self, (wish, reply): Wish) {
            let lease = self.pool.reserve(wish.positions);
            assert!(reply.send(lease).is_ok(), "prefill waits for its pages");
        }

        /// Admits a request, grants its pages, and waits until prefill keeps it. No question may be held:
        /// its answer could take the prompt away at once.
        async fn prompt(&mut self, key: u64, len: usize) -> TokenStream {
            let (wish, stream) = self.admit(key, len).await;
            let before = self.peek().await.0;
            self.grant(wish);
            self.until(|(prompts, ..)| prompts > before).await;
            stream
        }

        async fn peek(&self) -> (usize, usize, bool) {
            within(self.prefill.send(Peek)).await.expect("prefill answers")
        }

        async fn until(&self, wanted: impl Fn((usize, usize, bool)) -> bool) {
            within(async {
                while !wanted(self.peek().await) {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        }

        /// Asks for chunks, now; the answer can be awaited later.
        fn ask(&self, budget: usize, live: usize) -> impl Future<Output = Vec<Chunk>> + use<> {
            let answer = self.prefill.send(NextChunk { budget, live });
            async { within(answer).await.expect("prefill answers") }
        }

        async fn chunks(&self, budget: usize, live: usize) -> Vec<(u64, usize, usize, bool)> {
            plain(&self.ask(budget, live).await)
        }
    }

    /// (key, start, length, last) of each chunk.
    fn plain(chunks: &[Chunk]) -> Vec<(u64, usize, usize, bool)> {
        for chunk in chunks {
            assert_eq!(chunk.sequence.is_some(), chunk.start == 0, "a sequence comes with its first chunk");
            let lease = chunk.sequence.as_ref().map(|sequence| sequence.lease.is_some());
            assert_ne!(lease, Some(false), "and has its pages");
        }
        chunks.iter().map(|chunk| (chunk.key.0, chunk.start, chunk.len, chunk.last)).collect()
    }

    #[actix::test]
    async fn prompts_share_the_budget_first_in_first_out() {
        let mut rig = Rig::new(Policy::Fused, 4);
        let _clients = [rig.prompt(1, 10).await, rig.prompt(2, 4).await, rig.prompt(3, 20).await];
        assert_eq!(rig.chunks(16, 0).await, [(1, 0, 10, true), (2, 0, 4, true), (3, 0, 2, false)]);
        assert_eq!(rig.chunks(0, 3).await, [], "no budget, no chunk");
        assert_eq!(rig.chunks(5, 3).await, [(3, 2, 5, false)]);
        assert_eq!(rig.chunks(PLENTY, 3).await, [(3, 7, 13, true)]);
        assert_eq!(rig.chunks(PLENTY, 3).await, []);
    }

    #[actix::test]
    async fn who_came_first_goes_first_whenever_its_pages_come() {
        let mut rig = Rig::new(Policy::Fused, 4);
        let (first, _first) = rig.admit(1, 5).await;
        let _second = rig.prompt(2, 6).await;
        rig.grant(first);
        rig.until(|(prompts, ..)| prompts == 2).await;
        assert_eq!(rig.chunks(PLENTY, 0).await, [(1, 0, 5, true), (2, 0, 6, true)]);
    }

    #[actix::test]
    async fn a_question_is_held_until_there_is_work_unless_somebody_lives() {
        let mut rig = Rig::new(Policy::Fused, 4);
        assert_eq!(rig.chunks(PLENTY, 1).await, []);
        let answer = rig.ask(PLENTY, 0);
        let (wish, _client) = rig.admit(1, 5).await;
        assert_eq!(rig.peek().await, (0, 0, true), "a prompt without pages is no work");
        rig.grant(wish);
        assert_eq!(plain(&answer.await), [(1, 0, 5, true)]);
    }

    #[actix::test]
    async fn who_gets_no_pages_goes_home() {
        let mut rig = Rig::new(Policy::Fused, 4);
        let ((_, reply), _client) = rig.admit(1, 5).await;
        assert!(reply.send(None).is_ok());
        next(&mut rig.permits).await;
        assert_eq!(rig.peek().await.0, 0);
    }

    #[actix::test]
    async fn who_hung_up_is_dropped_and_kv_hears_of_its_pages() {
        let mut rig = Rig::new(Policy::Fused, 4);
        let _first = rig.prompt(1, 10).await;
        let second = rig.prompt(2, 10).await;
        let _third = rig.prompt(3, 10).await;
        drop(second);
        assert_eq!(rig.chunks(PLENTY, 0).await, [(1, 0, 10, true), (3, 0, 10, true)]);
        next(&mut rig.returned).await;
        next(&mut rig.permits).await;
        // A prompt that has begun as well: its sequence is decode's, its rest is void.
        let begun = rig.prompt(4, 10).await;
        let _last = rig.prompt(5, 3).await;
        assert_eq!(rig.chunks(4, 2).await, [(4, 0, 4, false)]);
        drop(begun);
        assert_eq!(rig.chunks(PLENTY, 2).await, [(5, 0, 3, true)]);
        next(&mut rig.returned).await;
    }

    #[actix::test]
    async fn pages_of_who_hung_up_are_free_when_kv_hears_of_them() {
        let mut rig = Rig::new(Policy::Fused, 4);
        drop(rig.prompt(1, 60).await);
        assert_eq!(rig.pool.used(), 2);
        assert_eq!(rig.chunks(PLENTY, 1).await, []);
        next(&mut rig.returned).await;
        assert_eq!(rig.pool.used(), 0);
    }

    #[actix::test]
    async fn after_a_fault_what_had_begun_is_forgotten_and_what_had_not_is_kept() {
        for policy in [Policy::Fused, Policy::Window { window: HOUR }] {
            let mut rig = Rig::new(policy, 3);
            let _clients = [rig.prompt(1, 20).await, rig.prompt(2, 10).await, rig.prompt(3, 10).await];
            assert_eq!(rig.chunks(8, 0).await, [(1, 0, 8, false)]);
            rig.prefill.do_send(ForgetBegun);
            assert_eq!(rig.peek().await, (2, 2, false), "{policy:?}");
            assert_eq!(rig.chunks(PLENTY, 0).await, [(2, 0, 10, true), (3, 0, 10, true)], "{policy:?}");
        }
    }

    #[actix::test]
    async fn a_window_gathers_until_every_slot_has_its_prompt() {
        let mut rig = Rig::new(Policy::Window { window: HOUR }, 3);
        let mut clients = vec![rig.prompt(1, 10).await, rig.prompt(2, 10).await];
        let answer = rig.ask(12, 0);
        assert_eq!(rig.peek().await, (2, 0, true), "the window is open");
        let (third, client) = rig.admit(3, 10).await;
        clients.push(client);
        rig.grant(third);
        assert_eq!(plain(&answer.await), [(1, 0, 10, true), (2, 0, 2, false)]);
        // Nobody joins, be it that a released prompt is on its way or that a sequence lives.
        for key in 4..7 {
            clients.push(rig.prompt(key, 5).await);
        }
        assert_eq!(rig.chunks(PLENTY, 2).await, [(2, 2, 8, true), (3, 0, 10, true)]);
        assert_eq!(rig.chunks(PLENTY, 1).await, []);
        assert_eq!(rig.peek().await, (3, 0, false));
        assert_eq!(rig.chunks(PLENTY, 0).await, [(4, 0, 5, true), (5, 0, 5, true), (6, 0, 5, true)]);
    }

    #[actix::test]
    async fn a_released_prompt_whose_client_left_does_not_make_room_for_another() {
        let mut rig = Rig::new(Policy::Window { window: HOUR }, 3);
        let _first = rig.prompt(1, 10).await;
        let second = rig.prompt(2, 10).await;
        let _third = rig.prompt(3, 10).await;
        assert_eq!(rig.chunks(4, 0).await, [(1, 0, 4, false)]);
        drop(second);
        let _fourth = rig.prompt(4, 10).await;
        assert_eq!(rig.chunks(PLENTY, 1).await, [(1, 4, 6, true), (3, 0, 10, true)]);
        assert_eq!(rig.peek().await, (1, 0, false));
    }

    #[actix::test]
    async fn a_window_ends_by_the_clock_but_not_while_somebody_lives() {
        let mut rig = Rig::new(Policy::Window { window: Duration::from_millis(1) }, 3);
        let answer = rig.ask(PLENTY, 0);
        let (first, _client) = rig.admit(1, 10).await;
        rig.grant(first);
        assert_eq!(plain(&answer.await), [(1, 0, 10, true)]);
        let mut rig = Rig::new(Policy::Window { window: Duration::ZERO }, 3);
        let _first = rig.prompt(1, 10).await;
        assert_eq!(rig.chunks(PLENTY, 1).await, []);
        assert_eq!(rig.chunks(PLENTY, 0).await, [(1, 0, 10, true)]);
    }
}
