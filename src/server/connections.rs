//! The open connections of a listener, and their limits.
//!
//! A connection is busy from when its request has been read whole until its response has been passed on, and
//! while a request waits for memory for its body. It is idle otherwise: in a TLS handshake, while a request
//! arrives, and between two requests. One that takes bytes of a response, or sends some of a body, has been
//! idle since then only.
//! Invariant: there are never more connections than the limit. If it is reached, a new connection takes the
//! place of the one that has been idle for longest, so connections without requests keep nobody out.

use super::failed_keys::network;
use crate::telemetry;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// The open connections of a listener.
#[derive(Debug)]
pub struct Connections {
    /// Maximum number; at least 1.
    limit: usize,
    /// Maximum number from one address; `None` is unlimited.
    address_limit: Option<usize>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    open: HashMap<u64, OpenConnection>,
    /// Ids of the idle connections by the number of the change that made them idle, the first one for
    /// longest.
    idle: BTreeMap<u64, u64>,
    addresses: HashMap<IpAddr, usize>,
    changes: u64,
}

#[derive(Debug)]
struct OpenConnection {
    network: IpAddr,
    /// Number and time of the change that made it idle; `None` if it is busy.
    idle: Option<(u64, Instant)>,
    closing: Arc<Notify>,
}

/// The reason for which a connection is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The limit is reached, and every connection is busy.
    Full,
    /// The limit of its address is reached.
    Address,
}

/// An accepted connection, until it is dropped.
#[derive(Debug)]
pub struct Connection {
    connections: Arc<Connections>,
    id: u64,
    is_busy: AtomicBool,
    closing: Arc<Notify>,
}

impl Connections {
    /// Creates an empty table for at most `limit` connections, and `address_limit` from one address.
    pub fn new(limit: usize, address_limit: Option<usize>) -> Arc<Connections> {
        Arc::new(Connections { limit, address_limit, table: Mutex::default() })
    }

    /// Accepts a connection from `address`, if necessary in the place of the one that has been idle for
    /// longest, which is closed.
    pub fn accept(self: &Arc<Self>, address: IpAddr) -> Result<Connection, Refusal> {
        let network = network(address);
        let mut table = self.lock();
        let from_there = table.addresses.get(&network).copied().unwrap_or(0);
        if self.address_limit.is_some_and(|limit| from_there >= limit) {
            return Err(Refusal::Address);
        }
        if table.open.len() >= self.limit {
            let (_, longest_idle) = table.idle.pop_first().ok_or(Refusal::Full)?;
            table.remove(longest_idle).iter().for_each(|closed| closed.closing.notify_one());
            telemetry::CONNECTIONS_CLOSED.count(["idle"]);
        }
        table.changes += 1;
        let (id, closing) = (table.changes, Arc::new(Notify::new()));
        table.open.insert(id, OpenConnection { network, idle: None, closing: closing.clone() });
        table.set_idle(id, true);
        *table.addresses.entry(network).or_default() += 1;
        telemetry::CONNECTIONS.gauge().increment(1.0);
        Ok(Connection { connections: self.clone(), id, is_busy: AtomicBool::new(false), closing })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn remove(&mut self, id: u64) -> Option<OpenConnection> {
        let removed = self.open.remove(&id)?;
        telemetry::CONNECTIONS.gauge().decrement(1.0);
        removed.idle.map(|(change, _)| self.idle.remove(&change));
        if let Some(count) = self.addresses.get_mut(&removed.network) {
            *count -= 1;
            if *count == 0 {
                self.addresses.remove(&removed.network);
            }
        }
        Some(removed)
    }

    /// Marks a connection as idle from now on, or as busy.
    fn set_idle(&mut self, id: u64, is_idle: bool) {
        let Some(connection) = self.open.get_mut(&id) else { return };
        if let Some((change, _)) = connection.idle.take() {
            self.idle.remove(&change);
        }
        if is_idle {
            self.changes += 1;
            connection.idle = Some((self.changes, Instant::now()));
            self.idle.insert(self.changes, id);
        }
    }
}

impl Connection {
    /// Marks the connection as busy: its request has been read, or waits for the server.
    pub fn set_busy(&self) {
        self.is_busy.store(true, Ordering::Relaxed);
        self.connections.lock().set_idle(self.id, false);
    }

    /// Marks the connection as idle from now on: its response has been passed on, or it waits for its client.
    pub fn set_idle(&self) {
        self.is_busy.store(false, Ordering::Relaxed);
        self.connections.lock().set_idle(self.id, true);
    }

    /// Begins the time anew for which an idle connection has been idle: its client has taken bytes of the
    /// response, or has sent some of its request.
    pub fn touch(&self) {
        // Without the lock that all connections share: streams do this for each token.
        if self.is_busy.load(Ordering::Relaxed) {
            return;
        }
        let mut table = self.connections.lock();
        if table.open.get(&self.id).is_some_and(|open| open.idle.is_some()) {
            table.set_idle(self.id, true);
        }
    }

    /// Completes when the connection is to be closed: another one has taken its place, or it has been idle
    /// for `idle_max`.
    pub async fn closed(&self, idle_max: Duration) {
        let overdue = async {
            loop {
                let idle = self.connections.lock().open.get(&self.id).and_then(|open| open.idle);
                // One that is busy now is looked at again after the same time.
                let due = idle.map_or_else(Instant::now, |(_, since)| since) + idle_max;
                if due <= Instant::now() {
                    return;
                }
                sleep_until(due).await;
            }
        };
        tokio::select! {
            () = self.closing.notified() => {}
            () = overdue => telemetry::CONNECTIONS_CLOSED.count(["timeout"]),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connections.lock().remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    const LONG: Duration = Duration::from_secs(3600);

    fn address(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    /// Returns whether a connection is to be closed.
    fn is_closed(connection: &Connection) -> bool {
        connection.closed(LONG).now_or_never().is_some()
    }

    #[actix_web::test]
    async fn a_new_connection_takes_the_place_of_the_longest_idle() {
        let all = Connections::new(3, None);
        let [first, second, third] = [1, 2, 3].map(|last| all.accept(address(last)).unwrap());
        first.set_busy();
        third.set_busy();
        third.set_idle();
        let fourth = all.accept(address(4)).unwrap();
        assert_eq!([&first, &second, &third, &fourth].map(is_closed), [false, true, false, false]);
        first.set_idle();
        let _fifth = all.accept(address(5)).unwrap();
        assert_eq!([&first, &third, &fourth].map(is_closed), [false, true, false]);
        // What is closed already frees no place.
        drop([second, third]);
        first.set_busy();
        fourth.set_busy();
        _fifth.set_busy();
        assert_eq!(all.accept(address(6)).unwrap_err(), Refusal::Full);
        drop(fourth);
        assert!(all.accept(address(6)).is_ok());
        assert_eq!(all.lock().open.len(), 2);
    }

    /// Regression: a long response was cut off while its client was taking it.
    #[actix_web::test]
    async fn a_connection_that_takes_its_response_is_not_the_longest_idle() {
        let all = Connections::new(3, None);
        let [reader, stalled, busy] = [1, 2, 3].map(|last| all.accept(address(last)).unwrap());
        busy.set_busy();
        reader.touch();
        busy.touch();
        let _new = all.accept(address(4)).unwrap();
        assert_eq!([&reader, &stalled, &busy].map(is_closed), [false, true, false]);
        let _another = all.accept(address(5)).unwrap();
        assert_eq!([&reader, &busy].map(is_closed), [true, false]);
    }

    #[actix_web::test]
    async fn an_address_has_a_limit_of_its_own() {
        let all = Connections::new(9, Some(2));
        let _two = [1, 1].map(|last| all.accept(address(last)).unwrap());
        assert_eq!(all.accept(address(1)).unwrap_err(), Refusal::Address);
        let other = all.accept(address(2)).unwrap();
        assert_eq!(all.accept("::ffff:192.0.2.1".parse().unwrap()).unwrap_err(), Refusal::Address);
        drop(other);
        drop(_two);
        let table = all.lock();
        assert!(table.open.is_empty() && table.idle.is_empty() && table.addresses.is_empty());
    }

    /// A client that sends half of its second request would stay for ever.
    #[actix_web::test]
    async fn a_connection_is_closed_after_its_idle_time_only() {
        let all = Connections::new(9, None);
        let [busy, idle] = [1, 2].map(|last| all.accept(address(last)).unwrap());
        busy.set_busy();
        idle.closed(Duration::from_millis(1)).await;
        assert!(busy.closed(Duration::ZERO + Duration::from_millis(1)).now_or_never().is_none());
        busy.set_idle();
        busy.closed(Duration::from_millis(1)).await;
    }
}
