//! What the definitions of all mechanisms share: which calls they take, which keys a row sees, and their rows one after the other.
//! Never optimised.

use super::{Call, Compute, Dims, Keys, Order, Reference};
use crate::error::{Error, expect};

/// Refuses calls that make no sense, and those that go on from a state: definitions take all tokens at once.
pub(crate) fn check_reference(mechanism: &impl Compute, call: &Call<'_, f64>) -> Result<(), Error> {
    mechanism.check(call)?;
    let (argument, expected) = ("initial_state of the reference", || "none: prepend the earlier tokens instead".into());
    expect(call.initial_state.is_none(), mechanism.name(), argument, expected, || "a state".into())
}

impl Reference {
    /// The rows, each with its denominator, of `[batch, head, query]`.
    pub(crate) fn of_rows(dims: &Dims, row: impl Fn([usize; 3]) -> (Vec<f64>, f64)) -> Self {
        let mut all = Self { out: Vec::new(), denominators: Vec::new() };
        for batch in 0..dims.batch {
            for head in 0..dims.heads {
                for i in 0..dims.queries {
                    let (out, denominator) = row([batch, head, i]);
                    all.out.extend(out);
                    all.denominators.push(denominator);
                }
            }
        }
        all
    }
}

/// Row `i` and key `j` as counted within their own sequence, if the row sees the key.
pub(crate) fn places(call: &Call<'_, f64>, [batch, i, j]: [usize; 3]) -> Option<(usize, usize)> {
    let (i, j, present) = match call.mask.keys {
        Keys::All => (i, j, true),
        Keys::Lengths(lengths) => (i, j, j < lengths[batch]),
        Keys::Padding(ignored) => (i, j, !ignored[batch * call.dims.keys + j]),
        Keys::Packed { queries, keys } => {
            let own = (1..queries.len()).find(|&s| i < queries[s])? - 1;
            (i - queries[own], j.saturating_sub(keys[own]), (keys[own]..keys[own + 1]).contains(&j))
        }
    };
    let past = j as isize <= i as isize + call.mask.offset;
    (present && (call.mask.order == Order::Bidirectional || past)).then_some((i, j))
}

/// The distance `δ = j − (i + o)`, if row `i` sees key `j`.
pub(crate) fn distance(call: &Call<'_, f64>, place: [usize; 3]) -> Option<isize> {
    let (i, j) = places(call, place)?;
    Some(j as isize - (i as isize + call.mask.offset))
}
