//! Delays of answers to clients that send wrong API keys, by address.
//!
//! Invariant: a valid key is never delayed, since clients behind one proxy share an address; and the
//! addresses take bounded memory.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of wrong keys of an address that are answered without a delay.
const FREE_FAILURES: u32 = 20;

/// Time after which one wrong key of an address is forgotten.
const FORGET_INTERVAL: Duration = Duration::from_secs(3);

/// First delay; each further wrong key doubles it.
const FIRST_DELAY: Duration = Duration::from_millis(100);

const DELAY_MAX: Duration = Duration::from_secs(10);

/// Maximum number of addresses that are remembered; the one without a wrong key for longest is forgotten.
const ADDRESSES_MAX: usize = 4096;

/// Numbers of wrong API keys by address.
#[derive(Debug, Default)]
pub struct FailedKeys(Mutex<HashMap<IpAddr, Failures>>);

#[derive(Clone, Copy, Debug)]
struct Failures {
    count: u32,
    /// Time of the last wrong key.
    last: Instant,
}

impl FailedKeys {
    /// Counts a wrong key from `address` at `now`, and returns how long its answer is to be delayed.
    pub fn delay(&self, address: IpAddr, now: Instant) -> Duration {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let network = network(address);
        if known.len() >= ADDRESSES_MAX && !known.contains_key(&network) {
            let oldest = known.iter().min_by_key(|(_, failures)| failures.last).map(|(network, _)| *network);
            oldest.map(|oldest| known.remove(&oldest));
        }
        let failures = known.entry(network).or_insert(Failures { count: 0, last: now });
        let forgotten = now.duration_since(failures.last).as_secs() / FORGET_INTERVAL.as_secs();
        let left = u64::from(failures.count).saturating_sub(forgotten) as u32;
        *failures = Failures { count: left.saturating_add(1), last: now };
        match failures.count.checked_sub(FREE_FAILURES + 1) {
            None => Duration::ZERO,
            Some(doublings) => FIRST_DELAY.saturating_mul(1 << doublings.min(16)).min(DELAY_MAX),
        }
    }
}

/// Returns what counts as one address: of IPv6, the network of 64 bits, in which a client can choose its
/// address.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_failures_wait_ever_longer_and_are_forgotten() {
        let (failed, now) = (FailedKeys::default(), Instant::now());
        let one = "192.0.2.1".parse().unwrap();
        for _ in 0..FREE_FAILURES {
            assert_eq!(failed.delay(one, now), Duration::ZERO);
        }
        let delays: Vec<_> = (0..9).map(|_| failed.delay(one, now).as_millis()).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 6400, 10000, 10000]);
        assert_eq!(failed.delay("::ffff:192.0.2.1".parse().unwrap(), now), DELAY_MAX);
        assert_eq!(failed.delay("192.0.2.2".parse().unwrap(), now), Duration::ZERO);
        // Of 30, 10 are forgotten after 30 s.
        assert_eq!(failed.delay(one, now + Duration::from_secs(30)), FIRST_DELAY);
        assert_eq!(failed.delay(one, now + Duration::from_secs(3600)), Duration::ZERO);
    }

    #[test]
    fn a_network_of_ipv6_is_one_address_and_memory_is_bounded() {
        let (failed, now) = (FailedKeys::default(), Instant::now());
        for i in 0..=FREE_FAILURES {
            let delay = failed.delay(format!("2001:db8:1:2::{i:x}").parse().unwrap(), now);
            assert_eq!(delay.is_zero(), i < FREE_FAILURES);
        }
        for i in 0..2 * ADDRESSES_MAX as u32 {
            failed.delay(IpAddr::V4(i.into()), now + Duration::from_millis(i.into()));
        }
        assert_eq!(failed.0.lock().unwrap().len(), ADDRESSES_MAX);
    }
}
