//! Runs each scenario under some schedules, and in ignored tests under many more.

use mainstem_schedules::{actors, check, decoding, scenarios, telemetry};

/// Factor for the number of schedules in the ignored tests.
const MANY: usize = 50;

/// Defines the tests of scenarios: the name, the module, and the number of schedules of each kind.
macro_rules! schedules {
    ($($name:ident: $module:path, $runs:literal;)*) => {
        $(
            #[test]
            fn $name() {
                use $module as module;
                check($runs, module::$name);
            }
        )*

        /// Runs the same scenarios under many schedules.
        mod many {
            use super::*;

            $(
                #[test]
                #[ignore = "takes up to a minute; .ci/long runs it"]
                fn $name() {
                    use $module as module;
                    check(MANY * $runs, module::$name);
                }
            )*
        }
    };
}

schedules! {
    every_late_input_wakes_its_row: scenarios, 500;
    an_abort_ends_every_wait_for_late_inputs: scenarios, 500;
    ranks_exchange_what_each_contributes: scenarios, 200;
    an_abort_wakes_every_rank: scenarios, 500;
    no_rank_waits_for_a_dropped_one: scenarios, 300;
    a_pool_runs_every_item_once: scenarios, 200;
    each_line_is_written_or_counted: telemetry::scenarios, 500;
    rows_are_drawn_in_order: decoding::scenarios, 200;
    a_failed_draw_fails_only_its_sequence: decoding::scenarios, 200;
    a_dropped_pool_leaves_no_row_waiting: decoding::scenarios, 500;
    masks_follow_the_tokens: decoding::scenarios, 100;
    a_failed_constraint_fails_its_rows: decoding::scenarios, 100;
    a_mailbox_loses_no_command: actors::scenarios, 500;
    a_closed_mailbox_drops_what_is_sent: actors::scenarios, 500;
    a_healthy_group_returns_results_in_order: actors::scenarios, 50;
    a_fault_ends_the_epoch: actors::scenarios, 50;
    a_hung_device_is_replaced: actors::scenarios, 50;
    a_group_can_be_stopped_at_any_time: actors::scenarios, 50;
    a_failed_build_ends_the_start: actors::scenarios, 50;
    a_failed_rebuild_is_repeated: actors::scenarios, 50;
}
