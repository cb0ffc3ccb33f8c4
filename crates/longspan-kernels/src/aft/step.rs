//! One token at a time: what the forward pass would give for the last row.

use smallvec::SmallVec;

use super::kernel;
use super::log_sum::{PARTS, clear, join, write_item};
use super::options::{Aft, Variant};
use super::outputs::GatedMean;
use super::state::{self, FILLED, Head, OLDEST, POSITION};
use super::tokens::{JOINED, JoinTokens, Tokens};
use crate::call::{Dims, Mechanism, State, Step, StepMemory, Token, check_token, token_dims};
use crate::error::{Error, expect};
use crate::simd::block::dot;
use crate::simd::rows::{Columns, Rows, padded};
use crate::simd::{Real, dispatch};

impl Step for Aft {
    fn step<T: Real>(&self, token: &Token<'_, T>, state: &mut State<T>, out: &mut [T]) -> Result<(), Error> {
        let operation = self.name();
        let dims = token_dims(self, token, token.v, state)?;
        let Dims { batch, heads, kv_heads, head_dim: width, .. } = dims;
        check_token(self, &dims, token, state, out)?;
        let key_dim = self.key_dim(&dims);
        if let Some(length) = self.table_length() {
            for batch in 0..batch {
                let position = state::position(state, batch);
                let expected = || format!("fewer than {length} tokens, the length of the table of biases");
                expect(position < length, operation, "state", expected, || position.to_string())?;
            }
        }
        if heads == 0 {
            return Ok(());
        }

        let padded = padded::<T>(width);
        let kernels: SmallVec<[T; 512]>;
        let kernels = match self.variant {
            Variant::Conv { taps, normalized: true } => {
                kernels = kernel::normalized(token.parameters, taps);
                &kernels[..]
            }
            _ => token.parameters.first().copied().unwrap_or(&[]),
        };
        let ring = self.ring();
        let mean = PARTS * padded;
        let mut memory = StepMemory::new();
        let (far, rest) = memory.take(3 * mean).split_at_mut(mean);
        let (sum, item) = rest.split_at_mut(mean);
        let group = dims.group();
        let mut biases = [T::ZERO; JOINED];
        for (index, mut head) in state.heads_mut().map(Head::from).enumerate() {
            let k = &token.k[index * key_dim..][..key_dim];
            let v = &token.v[index * width..][..width];
            clear(far);
            head.read(far);
            let oldest = head.marks[OLDEST].to_f64() as usize;
            let position = head.marks[POSITION].to_f64() as usize;
            // A state may claim more tokens than positions, but no bias stands before the first position.
            let filled = head.marks[FILLED].to_f64() as usize;
            let filled = if matches!(self.variant, Variant::Full { .. }) { filled.min(position) } else { filled };
            // Without windows all query heads see the same.
            let simple = matches!(self.variant, Variant::Simple);
            if simple {
                write_item(Some((k, v)), padded, item);
                join(far, item, T::ZERO);
            }
            for n in 0..group {
                let query_head = index % kv_heads * group + n;
                // Those of places one after the other, from `ring` tokens ago (place 0) to the token itself.
                let write_biases = |place: usize, to: &mut [T]| {
                    let start = match self.variant {
                        Variant::Local { window, .. } => position * (2 * window - 1) + place,
                        Variant::Conv { taps, .. } => query_head * taps + place,
                        Variant::Full { length, rank: None } => position * length + position + place - ring,
                        Variant::Full { rank: Some(rank), .. } => {
                            let rows = &token.parameters[1][(position + place - ring) * rank..];
                            for (n, to) in to.iter_mut().enumerate() {
                                *to = dot(&kernels[position * rank..][..rank], &rows[n * rank..][..rank]);
                            }
                            return;
                        }
                        // Images have no state, which was checked.
                        Variant::Simple | Variant::Conv2d { .. } => return to.fill(T::ZERO),
                    };
                    to.copy_from_slice(&kernels[start..][..to.len()]);
                };
                sum.copy_from_slice(far);
                // A full ring is read as it stands, whichever of its rows is the oldest; one with empty rows from the oldest token on.
                // The token itself comes last.
                let whole = filled == ring;
                let mut at = match (simple, whole) {
                    (true, _) => ring + 1,
                    (_, true) => 0,
                    (_, false) => ring - filled,
                };
                while at <= ring && width > 0 {
                    let row = if whole { at } else { (oldest + at) % ring };
                    let (keys, values, count) = if at == ring {
                        (k, v, 1)
                    } else {
                        let count = (ring - row.max(at)).min(JOINED);
                        (&head.ring_keys[row * key_dim..], &head.ring_values[row * width..], count)
                    };
                    // In front of a full ring's oldest row stand the newest ones.
                    let in_ring = whole && at < ring;
                    let newer = if in_ring { oldest.clamp(at, at + count) - at } else { 0 };
                    let (first, rest) = biases[..count].split_at_mut(newer);
                    if newer > 0 {
                        write_biases(at + ring - oldest, first);
                    }
                    if newer < count {
                        write_biases(if in_ring { at + newer - oldest } else { at }, rest);
                    }
                    let tokens = Tokens {
                        keys: Rows { data: keys, stride: key_dim },
                        key_dim,
                        values: Rows { data: values, stride: width },
                        count,
                        head_dim: width,
                    };
                    dispatch(JoinTokens { tokens, biases: &biases[..count], mean: sum });
                    at += count;
                }
                let row = index * group + n;
                let queries = self.gate.then(|| Rows { data: &token.q[row * width..][..width], stride: width });
                dispatch(GatedMean { mean: sum, queries, to: Columns::single(&mut out[row * width..][..width]) });
            }
            // The oldest token leaves the windows' reach, this one takes its place.
            if simple {
                head.write(far);
                continue;
            }
            if ring == 0 {
                write_item(Some((k, v)), padded, item);
            } else {
                let key = &mut head.ring_keys[oldest * key_dim..][..key_dim];
                let value = &mut head.ring_values[oldest * width..][..width];
                write_item(Some((&*key, &*value)), padded, item);
                key.copy_from_slice(k);
                value.copy_from_slice(v);
            }
            join(far, item, T::ZERO);
            head.write(far);
            let marks = state::advance(self, head.marks, 1);
            head.marks[..state::MARKS].copy_from_slice(&marks);
        }
        Ok(())
    }
}
