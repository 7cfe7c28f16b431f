//! The origin of a request: its client, and how urgent it says it is.
//!
//! Invariant: no request goes before others of its class unless its client may.

use super::error::ApiError;
use super::fields::Fields;
use crate::request::{Class, Client, Request};
use std::sync::Arc;

/// Values of `service_tier` that ask for the later class.
const BATCH_TIERS: [&str; 2] = ["flex", "batch"];

/// What a request says of its urgency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Urgency {
    /// Its place among the requests of its class; lower ones go first.
    priority: i32,
    /// The earliest class that it asks for.
    class: Class,
}

impl Urgency {
    /// Takes `priority` and `service_tier` out of the fields of a request.
    pub fn parse(fields: &mut Fields) -> Result<Urgency, ApiError> {
        let priority = fields.take_integer("priority", i32::MIN.into(), i32::MAX.into())?;
        let tier = fields.take_string("service_tier")?;
        let is_batch = tier.is_some_and(|tier| BATCH_TIERS.contains(&&*tier));
        let class = if is_batch { Class::Batch } else { Class::Interactive };
        Ok(Urgency { priority: priority.unwrap_or(0) as i32, class })
    }
}

/// The client of a request, and the place of the request in the queue.
#[derive(Clone, Debug)]
pub struct Origin {
    client: Arc<Client>,
    class: Class,
    priority: i32,
}

impl Origin {
    /// Creates the origin of a client's request. Fails if the client may not use its priority.
    pub fn new(client: Arc<Client>, Urgency { priority, class }: Urgency) -> Result<Origin, ApiError> {
        if priority < 0 && !client.settings.may_prioritize {
            let message = format!(
                "'priority' is {priority}, but this client may not go before others: it must be at least 0"
            );
            return Err(ApiError::invalid("priority", message));
        }
        Ok(Origin { class: class.max(client.settings.class), client, priority })
    }

    /// Returns an engine request with this origin.
    pub fn of(&self, request: Request) -> Request {
        let Origin { client, class, priority } = self;
        Request { client: client.clone(), class: *class, priority: *priority, ..request }
    }
}
