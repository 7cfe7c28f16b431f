//! Tensors stored in another element order or type than the one needed: elements are picked by strides.
//!
//! Invariant: every element that the strides reach lies inside the stored bytes, and there are no more of
//! them than the file has. The creator of a [`Gather`] checks both.

use super::elements;

/// Describes how to pick a tensor's elements from its bytes.
#[derive(Debug)]
pub(super) struct Gather {
    /// Distance between consecutive indices of each dimension, in stored elements.
    pub(super) strides: Vec<usize>,
    pub(super) stored: StoredElement,
}

/// The encoding of a stored element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoredElement {
    /// In the output type, with this many bytes.
    Unchanged(usize),
    /// As F64, which is rounded to the nearest F32.
    F64,
}

impl StoredElement {
    /// Bytes of one stored element.
    fn stored_bytes(self) -> usize {
        match self {
            StoredElement::Unchanged(bytes) => bytes,
            StoredElement::F64 => size_of::<f64>(),
        }
    }

    /// Bytes of one output element.
    fn output_bytes(self) -> usize {
        match self {
            StoredElement::Unchanged(bytes) => bytes,
            StoredElement::F64 => size_of::<f32>(),
        }
    }

    fn append_to(self, number: &[u8], out: &mut Vec<u8>) {
        match self {
            StoredElement::Unchanged(_) => out.extend_from_slice(number),
            StoredElement::F64 => {
                let bytes = number.try_into().expect("an F64 has eight bytes; this is a bug");
                out.extend_from_slice(&(f64::from_le_bytes(bytes) as f32).to_le_bytes());
            }
        }
    }
}

impl Gather {
    /// Bytes of all elements of `shape` in the output type.
    pub(super) fn bytes_len(&self, shape: &[usize]) -> usize {
        element_count(shape) * self.stored.output_bytes()
    }

    /// Returns the elements of a tensor of shape `shape` stored in `stored`, row-major.
    pub(super) fn gather(&self, stored: &[u8], shape: &[usize]) -> Vec<u8> {
        let width = self.stored.stored_bytes();
        let mut out = Vec::with_capacity(self.bytes_len(shape));
        let mut index = vec![0; shape.len()];
        let mut at = 0;
        for _ in 0..element_count(shape) {
            self.stored.append_to(&stored[at * width..][..width], &mut out);
            at = self.advance(&mut index, at, shape);
        }
        out
    }

    /// Increments `index`, last dimension fastest, and returns the position of the next element, given the
    /// current position `at`.
    fn advance(&self, index: &mut [usize], mut at: usize, shape: &[usize]) -> usize {
        for ((i, &size), &stride) in index.iter_mut().zip(shape).zip(&self.strides).rev() {
            if *i + 1 < size {
                *i += 1;
                return at + stride;
            }
            at -= *i * stride;
            *i = 0;
        }
        at
    }
}

fn element_count(shape: &[usize]) -> usize {
    elements(shape).expect("the element count was checked when the tensor was parsed; this is a bug")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_the_one_its_strides_lead_to() {
        let stored: Vec<u8> = (0..120).collect();
        for (shape, strides) in [
            (vec![5, 4, 3], vec![1, 5, 20]),
            (vec![4, 5], vec![1, 4]),
            (vec![2, 3], vec![7, 2]),
            (vec![3, 2], vec![0, 1]),
            (vec![6], vec![2]),
            (vec![2, 0], vec![1, 1]),
            (vec![], vec![]),
        ] {
            let gather = Gather { strides: strides.clone(), stored: StoredElement::Unchanged(2) };
            let picked = gather.gather(&stored, &shape);
            let total: usize = shape.iter().product();
            assert_eq!(picked.len(), gather.bytes_len(&shape));
            for flat in 0..total {
                let mut rest = flat;
                let mut at = 0;
                for (size, stride) in shape.iter().zip(&strides).rev() {
                    at += rest % size * stride;
                    rest /= size;
                }
                assert_eq!(picked[2 * flat..][..2], stored[2 * at..][..2], "{shape:?} {strides:?} {flat}");
            }
        }
    }

    #[test]
    fn doubles_become_the_nearest_floats() {
        let doubles = [1.5, -0.1, 1e300, f64::MIN_POSITIVE, std::f64::consts::PI];
        let stored: Vec<u8> = doubles.iter().flat_map(|x| x.to_le_bytes()).collect();
        let gather = Gather { strides: vec![1], stored: StoredElement::F64 };
        let floats = [1.5f32, -0.1, f32::INFINITY, 0.0, std::f32::consts::PI];
        let expected: Vec<u8> = floats.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(gather.gather(&stored, &[5]), expected);
        assert_eq!(gather.bytes_len(&[5]), 20);
    }
}
