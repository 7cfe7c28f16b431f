//! Curve styles: CSS classes for colour and dashes, and mark shapes.
//!
//! Invariant: a curve keeps its colour even if earlier curves have no points, so that a run looks the same in
//! all plots.

use crate::report::html::{Curve, CurveForm};

/// Number of colours in the style sheet.
const COLOURS: usize = 6;

/// The style of a curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurveStyle {
    /// Colour index; `None` is grey, for a reference common to all curves.
    colour: Option<usize>,
    pub shape: usize,
    /// Whether the colour is already used by an earlier curve.
    is_repeated: bool,
}

/// Assigns styles to curves. A single reference is grey; the n-th of several has the colour of the n-th
/// measured curve, its counterpart.
pub fn styles(curves: &[Curve]) -> Vec<CurveStyle> {
    let (references, ours) = curves.iter().partition::<Vec<_>, _>(|curve| curve.form == CurveForm::Reference);
    let (mut theirs, mut own) = (0..references.len(), 0..ours.len());
    let style = |curve: &Curve| match curve.form {
        CurveForm::Reference if references.len() == 1 => {
            CurveStyle { colour: None, shape: 0, is_repeated: false }
        }
        CurveForm::Reference => theirs.next().map_or(CurveStyle::nth(0), CurveStyle::nth),
        _ => own.next().map_or(CurveStyle::nth(0), CurveStyle::nth),
    };
    curves.iter().map(style).collect()
}

/// Returns the CSS classes of the n-th curve, for the key in its table row.
pub fn key_classes(index: usize) -> String {
    CurveStyle::nth(index).classes(CurveForm::Line)
}

impl CurveStyle {
    fn nth(index: usize) -> Self {
        Self { colour: Some(index % COLOURS), shape: index, is_repeated: index >= COLOURS }
    }

    /// Returns the CSS classes of a curve of this form.
    pub fn classes(self, form: CurveForm) -> String {
        let colour = self.colour.map_or("grey".into(), |colour| format!("c{colour}"));
        match (form, self.is_repeated) {
            (CurveForm::Reference, _) => colour + " dashed",
            (_, true) => colour + " dotted",
            (_, false) => colour,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes(forms: &[CurveForm]) -> Vec<String> {
        let curve = |&form| Curve { label: String::new(), points: Vec::new(), form };
        let curves: Vec<_> = forms.iter().map(curve).collect();
        styles(&curves).into_iter().zip(forms).map(|(style, &form)| style.classes(form)).collect()
    }

    #[test]
    fn references_are_dashed_and_have_their_counterparts_colours() {
        assert_eq!(classes(&[CurveForm::Reference, CurveForm::Line]), ["grey dashed", "c0"]);
        let paper_beside_ours =
            [CurveForm::Line, CurveForm::Reference, CurveForm::LineAndPoints, CurveForm::Reference];
        assert_eq!(classes(&paper_beside_ours), ["c0", "c0 dashed", "c1", "c1 dashed"]);
    }

    #[test]
    fn no_two_of_twelve_curves_look_alike() {
        let mut all = classes(&[CurveForm::Line; 12]);
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 12);
    }
}
