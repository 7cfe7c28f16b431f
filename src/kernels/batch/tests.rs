use super::*;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::time::Duration;

fn span(stack: SpanStack, len: u32, want: SpanOutput) -> Span {
    Span {
        model: SpanModel::Target,
        stack,
        slot: 0,
        start: 0,
        tokens: SpanTokens::Given { at: 0, len },
        table: SpanTable::Own,
        reserved: 9,
        encoder_len: 0,
        output: want,
    }
}

#[test]
fn output_rows_are_listed_stack_by_stack() {
    let (encoder, decoder) = (SpanStack::Encoder, SpanStack::Decoder);
    let batch = StepBatch {
        spans: vec![
            span(encoder, 4, SpanOutput::Selected { at: 1, len: 2 }),
            span(encoder, 3, SpanOutput::Hidden),
            span(decoder, 2, SpanOutput::None),
            span(decoder, 5, SpanOutput::Last),
            span(decoder, 3, SpanOutput::Selected { at: 0, len: 1 }),
            span(decoder, 2, SpanOutput::All),
            span(decoder, 2, SpanOutput::Hidden),
            span(decoder, 1, SpanOutput::Hidden),
        ],
        selected_rows: vec![1, 0, 3],
        ..StepBatch::default()
    };
    assert_eq!((batch.rows(), batch.rows_of(encoder), batch.rows_of(decoder)), (22, 7, 15));
    assert_eq!(batch.output_rows(encoder).collect::<Vec<_>>(), [0, 3]);
    assert_eq!(batch.output_rows(decoder).collect::<Vec<_>>(), [6, 8, 10, 11]);
    assert!(batch.hidden_rows(encoder).eq(std::iter::once(4..7)));
    assert_eq!(batch.hidden_rows(decoder).collect::<Vec<_>>(), [12..14, 14..15]);
}

/// Asserts that a value survives serialization unchanged, NaN included. Compares the Debug output, because
/// `==` ignores the sign of zero and never finds NaN equal.
fn assert_round_trip<T: Serialize + DeserializeOwned + Debug>(sent: &T) {
    let message = postcard::to_allocvec(sent).expect("it can be serialized");
    let received: T = postcard::from_bytes(&message).expect("it can be deserialized");
    assert_eq!(format!("{received:?}"), format!("{sent:?}"));
}

#[test]
fn step_messages_survive_serialization() {
    let row = SamplingParams {
        seed: u64::MAX,
        temperature: f32::MIN_POSITIVE,
        masked: true,
        logprob: true,
        ..SamplingParams::GREEDY
    };
    let hole = Span {
        model: SpanModel::Draft,
        slot: u32::MAX,
        tokens: SpanTokens::Last,
        table: SpanTable::Null,
        ..span(SpanStack::Decoder, 1, SpanOutput::None)
    };
    assert_round_trip(&StepBatch {
        step: u64::MAX,
        lane: 3,
        moves: vec![SlotMove { from: 5, to: 2 }],
        count_changes: vec![CountChange { slot: 2, at: 1, len: 2 }],
        token_counts: vec![(9, 1), (u32::MAX, IN_PROMPT), (3, u16::MAX)],
        table_updates: vec![
            TableUpdate { slot: 1, table: KvTable::Own, index: 7, page: 9 },
            TableUpdate { slot: 2, table: KvTable::Cross, index: 0, page: 300_000 },
        ],
        page_copies: vec![PageCopy { table: KvTable::Own, from: 4, to: 8 }],
        spans: vec![
            span(SpanStack::Encoder, 40, SpanOutput::Selected { at: 2, len: 3 }),
            Span { table: SpanTable::Scratch, ..span(SpanStack::Encoder, 3, SpanOutput::Hidden) },
            span(SpanStack::Decoder, 2, SpanOutput::All),
            Span {
                tokens: SpanTokens::Drafted { at: 3, len: 5 },
                ..span(SpanStack::Decoder, 5, SpanOutput::All)
            },
            hole,
        ],
        drafts: vec![DraftSpan {
            slot: 3,
            start: u32::MAX,
            tokens: SpanTokens::Generated { at: 2, len: 2 },
            reserved: 90,
            count: 4,
            sampling: row,
        }],
        tokens: vec![0, 127, 128, u32::MAX],
        selected_rows: vec![1, 0, 3],
        sampling: [row.mode, SampleMode::Score(5), SampleMode::Host]
            .map(|mode| SamplingParams { mode, ..row })
            .to_vec(),
        logit_biases: vec![(3, f32::NEG_INFINITY), (4, -0.0), (5, f32::INFINITY)],
        return_logits: true,
        draft_logits: true,
    });
    assert_round_trip(&ActivationHandoff { encoder: vec![], decoder: (0..=255).collect() });
    let sampled = SampledToken { rank: 3, top_at: 1, top_len: 2, ..SampledToken::new(4) };
    let failed = SampledToken::failed(RowFailure::NoLateInput);
    assert_round_trip(&StepOutput {
        step: 12,
        tokens: vec![sampled, SampledToken { logprob: -0.0, ..sampled }, failed],
        top_logprobs: vec![(4, f32::NEG_INFINITY)],
        hidden: vec![f32::MAX, 1e-45],
        logits: vec![0, 128, 255],
        drafts: vec![4, u32::MAX],
        times: StepTimes {
            forward: Duration::from_nanos(1_234_567_891),
            sample: Duration::MAX,
            draft: Duration::ZERO,
        },
    });
}
