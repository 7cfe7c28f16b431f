//! Parts of an answer, and the sink that the readers of the formats write them to.
//!
//! Invariant: text goes to content, to reasoning or to a call in the order of the output, and the arguments
//! of complete calls are JSON objects.

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputEvent {
    /// Text of the answer; never empty.
    Content(String),
    /// Text of the model's reasoning; never empty.
    Reasoning(String),
    /// A tool call begins.
    ToolCallStart {
        /// Number of calls before this one.
        index: usize,
        /// The id that the model wrote, or else a new one.
        id: String,
        name: String,
    },
    /// More text of a call's arguments. All of a call together are one JSON object, unless the output ends
    /// before, or what follows is not in the format and is returned as content.
    ToolCallArguments { index: usize, delta: String },
}

/// State of a reader of calls after a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// More characters follow.
    More,
    /// The calls end with this character.
    Done,
    /// The text before this character is not a call, or not a whole one.
    Invalid,
}

/// Sink of the parts of an answer: joins adjacent text, and numbers calls.
#[derive(Debug)]
pub(super) struct EventSink {
    events: Vec<OutputEvent>,
    /// Events of the open call, while whole calls are held back.
    held: Vec<OutputEvent>,
    /// Whether a call is returned only when it is complete.
    whole_calls: bool,
    /// Calls after this many are dropped.
    max_calls: usize,
    ids: CallIds,
    calls: usize,
    is_open: bool,
    has_complete_call: bool,
    has_delivered: bool,
}

impl EventSink {
    pub(super) fn new(ids: CallIds, whole_calls: bool, max_calls: usize) -> EventSink {
        EventSink {
            events: Vec::new(),
            held: Vec::new(),
            whole_calls,
            max_calls,
            ids,
            calls: 0,
            is_open: false,
            has_complete_call: false,
            has_delivered: false,
        }
    }

    /// Takes the events since the last time.
    pub(super) fn take(&mut self) -> Vec<OutputEvent> {
        std::mem::take(&mut self.events)
    }

    /// Returns whether there is a complete call.
    pub(super) fn has_complete_call(&self) -> bool {
        self.has_complete_call && self.max_calls > 0
    }

    /// Returns whether, since the last time, a part of a call was delivered, which can no longer be returned
    /// as content.
    pub(super) fn take_delivered(&mut self) -> bool {
        std::mem::take(&mut self.has_delivered)
    }

    pub(super) fn content(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputEvent::Content(last)) => last.push_str(text),
            _ => self.events.push(OutputEvent::Content(text.to_owned())),
        }
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputEvent::Reasoning(last)) => last.push_str(text),
            _ => self.events.push(OutputEvent::Reasoning(text.to_owned())),
        }
    }

    /// Begins a call, with the id that the model wrote, if any.
    pub(super) fn start(&mut self, name: &str, id: Option<String>) {
        let index = self.calls;
        self.calls += 1;
        self.is_open = true;
        let id = id.unwrap_or_else(|| self.ids.id(index));
        self.call_event(OutputEvent::ToolCallStart { index, id, name: name.to_owned() });
    }

    /// Adds text to the arguments of the open call.
    pub(super) fn arguments(&mut self, text: &str) {
        let index = self.calls.saturating_sub(1);
        let list = if self.whole_calls { &mut self.held } else { &mut self.events };
        if let Some(OutputEvent::ToolCallArguments { index: last, delta }) = list.last_mut()
            && *last == index
        {
            delta.push_str(text);
            self.has_delivered |= !self.whole_calls;
        } else {
            self.call_event(OutputEvent::ToolCallArguments { index, delta: text.to_owned() });
        }
    }

    /// Ends the open call, which is complete.
    pub(super) fn end(&mut self) {
        self.events.append(&mut self.held);
        self.is_open = false;
        self.has_complete_call = true;
        self.has_delivered = true;
    }

    /// Ends the open call, if any, because its text is not in the format. What is held back of it is dropped.
    pub(super) fn abandon(&mut self) {
        if std::mem::take(&mut self.is_open) && self.whole_calls {
            self.held.clear();
            self.calls -= 1;
        }
    }

    fn call_event(&mut self, event: OutputEvent) {
        self.has_delivered |= !self.whole_calls;
        if self.calls > self.max_calls {
            return;
        }
        let list = if self.whole_calls { &mut self.held } else { &mut self.events };
        list.push(event);
    }
}

/// Generator of call ids, which depend on a seed and the number of the call only.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallIds {
    pub(super) seed: u64,
    /// Nine letters and digits, which the chat templates of Mistral require.
    pub(super) is_short: bool,
}

impl CallIds {
    fn id(&self, index: usize) -> String {
        let mut state = self.seed ^ (index as u64).wrapping_mul(0xd134_2543_de82_ef95);
        let mut character = || {
            const CHARACTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            char::from(CHARACTERS[((mixed ^ (mixed >> 31)) % 62) as usize])
        };
        match self.is_short {
            true => (0..9).map(|_| character()).collect(),
            false => "call_".chars().chain((0..24).map(|_| character())).collect(),
        }
    }
}
