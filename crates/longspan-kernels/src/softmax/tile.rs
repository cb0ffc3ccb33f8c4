//! What a softmax asks of a tile of scores that stands transposed: a row of the tile is one key, a column one query. So
//! maxima and sums run down the columns, whole registers of queries at a time, and no register is ever summed up.

use crate::simd::operation;

// Takes `keys` rows of scores into running softmaxes: `highest` rises to the largest score of each column, scores become
// `e^{score − highest}`, `sums`, brought to the new maximum, takes them in, and `factors` says what brings whatever else
// was relative to the old one to the new. Starts from a finite `highest`.
operation!(SoftmaxTile, |scores: &'a mut [T],
                         row_length: usize,
                         keys: usize,
                         highest: &'a mut [T],
                         sums: &'a mut [T],
                         factors: &'a mut [T]| {
    let columns = highest.len();
    assert!(columns.is_multiple_of(V::LANES) && sums.len() >= columns && factors.len() >= columns);
    assert!(keys == 0 || (keys - 1) * row_length + columns <= scores.len());
    for column in (0..columns).step_by(V::LANES) {
        // SAFETY: every row has a register at `column` by the assertions above, and so have the three lines.
        unsafe {
            let scores = scores.as_mut_ptr().add(column);
            let before = V::load(highest.as_ptr().add(column));
            let mut top = before;
            for key in 0..keys {
                // `max` keeps its second operand where the first is NaN, which spreads through the sum.
                top = V::load(scores.add(key * row_length)).max(top);
            }
            let factor = before.sub(top).exp_nonpositive();
            let mut sum = V::load(sums.as_ptr().add(column)).mul(factor);
            for key in 0..keys {
                let at = scores.add(key * row_length);
                let weight = V::load(at).sub(top).exp_nonpositive();
                weight.store(at);
                sum = sum.add(weight);
            }
            top.store(highest.as_mut_ptr().add(column));
            factor.store(factors.as_mut_ptr().add(column));
            sum.store(sums.as_mut_ptr().add(column));
        }
    }
});

// `scores ← gain · e^{score − shift}` down each column, for scores that are at most `shift`.
operation!(ExpColumns, |scores: &'a mut [T], row_length: usize, keys: usize, shifts: &'a [T], gains: &'a [T]| {
    let columns = shifts.len();
    assert!(columns.is_multiple_of(V::LANES) && (keys == 0 || (keys - 1) * row_length + columns <= scores.len()));
    assert!(gains.len() >= columns);
    for column in (0..columns).step_by(V::LANES) {
        // SAFETY: every row has a register at `column` by the assertions above, and so have `shifts` and `gains`.
        unsafe {
            let (shift, gain) = (V::load(shifts.as_ptr().add(column)), V::load(gains.as_ptr().add(column)));
            for key in 0..keys {
                let at = scores.as_mut_ptr().add(key * row_length + column);
                V::load(at).sub(shift).exp_nonpositive().mul(gain).store(at);
            }
        }
    }
});

// The gradient of scores from that of weights: `d ← weight · (d − dot)` down each column.
operation!(SoftmaxPullBack, |weights: &'a [T], d: &'a mut [T], row_length: usize, keys: usize, dots: &'a [T]| {
    let columns = dots.len();
    let end = if keys == 0 { 0 } else { (keys - 1) * row_length + columns };
    assert!(columns.is_multiple_of(V::LANES) && end <= weights.len() && end <= d.len());
    for column in (0..columns).step_by(V::LANES) {
        // SAFETY: every row of both has a register at `column` by the assertion above, and so has `dots`.
        unsafe {
            let dot = V::load(dots.as_ptr().add(column));
            for key in 0..keys {
                let at = key * row_length + column;
                let place = d.as_mut_ptr().add(at);
                V::load(weights.as_ptr().add(at)).mul(V::load(place).sub(dot)).store(place);
            }
        }
    }
});
