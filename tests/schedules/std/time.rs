//! `std::time` with a clock of the scheduler: it advances a little with each reading, and to the end of a
//! timeout when that passes.

pub use ::std::time::*;

use ::std::cell::Cell;
use ::std::ops::{Add, AddAssign, Sub, SubAssign};

/// Time from one reading of the clock to the next: longer than the program spins, so that it soon sleeps.
const TICK: Duration = Duration::from_micros(50);

::std::thread_local! {
    /// The present time. All threads of an execution share a thread of the system.
    static NOW: Cell<Duration> = const { Cell::new(Duration::from_secs(1000)) };
}

/// A point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(Duration);

impl Instant {
    /// Returns the present time.
    pub fn now() -> Instant {
        NOW.set(NOW.get() + TICK);
        Instant(NOW.get())
    }

    /// Returns the time since then.
    pub fn elapsed(&self) -> Duration {
        Instant::now().saturating_duration_since(*self)
    }

    /// Returns the time since `earlier`, or zero.
    pub fn duration_since(&self, earlier: Instant) -> Duration {
        self.saturating_duration_since(earlier)
    }

    /// Returns the time since `earlier`, or zero.
    pub fn saturating_duration_since(&self, earlier: Instant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// Advances the clock to `time`, unless it is later.
pub(crate) fn advance_to(time: Instant) {
    NOW.set(NOW.get().max(time.0));
}

impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, time: Duration) -> Instant {
        Instant(self.0 + time)
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, time: Duration) {
        self.0 += time;
    }
}

impl Sub<Duration> for Instant {
    type Output = Instant;

    fn sub(self, time: Duration) -> Instant {
        Instant(self.0.saturating_sub(time))
    }
}

impl SubAssign<Duration> for Instant {
    fn sub_assign(&mut self, time: Duration) {
        self.0 = self.0.saturating_sub(time);
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Instant) -> Duration {
        self.saturating_duration_since(earlier)
    }
}
