use super::*;
use std::sync::mpsc;
use std::thread;

fn inputs() -> Arc<LateInputs> {
    Arc::default()
}

#[test]
fn a_mask_may_come_before_or_after_the_wait_begins() {
    let inputs = inputs();
    assert!(inputs.is_unused());
    let [early, late] = [7, 3].map(|row| inputs.mask_sender(row));
    assert!(!inputs.is_unused());
    early.send([1, 2].into());
    let mut mask = [0; 2];
    assert_eq!((inputs.wait_mask(7, &mut mask), mask), (Ok(true), [1, 2]));
    thread::scope(|scope| {
        scope.spawn(move || late.send([5, 6].into()));
        assert_eq!((inputs.wait_mask(3, &mut mask), mask), (Ok(true), [5, 6]));
    });
}

#[test]
fn a_token_may_be_drawn_at_once_or_on_another_thread() {
    let inputs = inputs();
    let (logits_of, drawer) = mpsc::channel::<(Vec<f32>, TokenSender)>();
    inputs.draw_with(0, |row, sender| sender.send(row.logits.len() as u32));
    inputs.draw_with(1, move |row, sender| logits_of.send((row.logits.to_vec(), sender)).unwrap());
    inputs.begin_draw(0, HostRow::of_logits(&[0.5; 9]));
    inputs.begin_draw(1, HostRow::of_logits(&[0.5; 4]));
    thread::scope(|scope| {
        scope.spawn(move || {
            let (logits, sender) = drawer.recv().unwrap();
            sender.send(10 * logits.len() as u32);
        });
        assert_eq!([0, 1].map(|row| inputs.wait_token(row)), [Ok(Some(9)), Ok(Some(40))]);
    });
}

#[test]
fn inputs_that_were_given_up_are_not_waited_for() {
    let inputs = inputs();
    let mut mask = [0; 2];
    drop(inputs.mask_sender(0));
    inputs.mask_sender(1).send([1].into());
    inputs.draw_with(2, |_, sender| drop(sender));
    inputs.draw_with(3, |_, _| panic!("the drawer fails"));
    inputs.draw_with(4, |_, sender| sender.send(5));
    [2, 3].iter().for_each(|row| inputs.begin_draw(*row, HostRow::of_logits(&[])));
    // The sender of row 0 is dropped, the mask of row 1 is too short, and row 9 is not registered.
    assert_eq!([0, 1, 9].map(|row| inputs.wait_mask(row, &mut mask)), [Ok(false); 3]);
    // The draw of row 4 was not begun.
    assert_eq!([2, 3, 4, 9].map(|row| inputs.wait_token(row)), [Ok(None); 4]);
    // A row of the other kind.
    inputs.begin_draw(4, HostRow::of_logits(&[]));
    assert_eq!((inputs.wait_mask(4, &mut mask), inputs.wait_token(1)), (Ok(false), Ok(None)));
}

#[test]
fn an_abort_ends_every_wait() {
    let inputs = inputs();
    let unregistered = self::inputs();
    unregistered.abort();
    assert!(!unregistered.is_unused());
    let sender = inputs.mask_sender(0);
    thread::scope(|scope| {
        scope.spawn(|| inputs.abort());
        assert_eq!(inputs.wait_mask(0, &mut [0]), Err(Aborted));
    });
    sender.send([1].into());
    assert_eq!((inputs.wait_mask(0, &mut [0]), inputs.wait_token(1)), (Err(Aborted), Err(Aborted)));
}

#[test]
#[should_panic = "row 4 has a late input already"]
fn a_row_has_one_late_input() {
    let inputs = inputs();
    let _mask = inputs.mask_sender(4);
    inputs.draw_with(4, |_, _| {});
}
