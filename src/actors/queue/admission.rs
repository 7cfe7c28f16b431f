//! Which requests the queue takes: its bound, and the limits of clients.
//!
//! Invariant: a client that is alone may fill the queue, and others find their share of it nevertheless. What
//! waits in a later class takes no room from an earlier one.

use super::forecast::retry_seconds;
use super::{FairQueue, QueuedClient, ROOM_FACTOR};
use crate::request::{Class, Client, RequestError};
use std::sync::Arc;
use std::time::Instant;

impl FairQueue {
    /// Checks that the queue has space for a client's request of `coming` slots, and that the client has not
    /// reached its limits. If it has space, the request counts.
    pub fn admit(
        &mut self,
        client: &Arc<Client>,
        class: Class,
        coming: usize,
        now: Instant,
    ) -> Result<(), RequestError> {
        self.drop_cancelled();
        self.configure(client, now).check_limits(now)?;
        if coming > 0 {
            self.check_space(client, class, coming, now)?;
        }
        self.client(client, now).requests.spend(1, now);
        Ok(())
    }

    /// Checks the queue's space. The queued sequences of the class and of earlier ones for which there are no
    /// slots may be as many as the queue's maximum in total, or the client's own as many as its share of it.
    fn check_space(
        &mut self,
        client: &Arc<Client>,
        class: Class,
        coming: usize,
        now: Instant,
    ) -> Result<(), RequestError> {
        let (limit, free) = (self.max_waiting, self.free_permits());
        let own = self.client(client, now);
        let room = own.room();
        let own_waiting = own.waiting_by(class);
        let others = self.queued().filter(|other| other.client.id != client.id);
        let allowed = others.map(|other| other.waiting_by(class).min(other.room())).sum::<usize>();
        let startable = (allowed + room.min(own_waiting + coming)).min(free);
        let all = self.waiting_by(class) + coming;
        let excess = (all - startable).saturating_sub(limit);
        let share = self.share_of_queue(client, class);
        let own_excess = (own_waiting + coming).saturating_sub(share);
        let is_full = all > ROOM_FACTOR.saturating_mul(limit);
        if excess == 0 || own_excess == 0 && !is_full {
            return Ok(());
        }
        let waiting = (self.waiting_by(class)).saturating_sub(self.startable());
        let retry_after_s = retry_seconds(self.ends.time_of(excess, now));
        Err(RequestError::Busy { coming, waiting, limit, retry_after_s })
    }

    /// Returns how many of the queued sequences may be the client's while others wait: a part of the maximum
    /// by its weight among the clients that wait in its class or an earlier one.
    fn share_of_queue(&self, client: &Client, class: Class) -> usize {
        let waits = |other: &&QueuedClient| other.client.id != client.id && other.waiting_by(class) > 0;
        let others = self.queued().filter(waits).map(|other| u64::from(other.account.weight()));
        let weight = u64::from(client.settings.weight);
        (self.max_waiting as u64 * weight / (weight + others.sum::<u64>()))
            .max(1)
            .min(self.max_waiting as u64) as usize
    }
}

impl QueuedClient {
    /// Checks the client's limits per minute.
    fn check_limits(&mut self, now: Instant) -> Result<(), RequestError> {
        let limits = [("requests", self.requests.wait(now)), ("tokens", self.account.tokens().wait(now))];
        for (what, wait) in limits {
            if let Some((wait, limit)) = wait {
                return Err(RequestError::RateLimited { what, limit, retry_after_s: retry_seconds(wait) });
            }
        }
        Ok(())
    }
}
