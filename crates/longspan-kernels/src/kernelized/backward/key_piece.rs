//! The gradients of a chunk of keys and values: the dense tile of the rows that stand at them, and the sums of those
//! beyond.

use super::super::problem::CHUNK;
use super::super::summary::{Summary, SummaryRef};
use super::super::taylor::{Weigh, add_columns};
use super::super::tile::{combine_states, linear_width, near_columns};
use super::key_buffers::KeyBuffers;
use super::key_walk::KeyWalk;
use crate::feature_map::elementwise::{Shift, copy_rows};
use crate::simd::block::{add_scaled, dot, multiply, scale_by, scale_rows, store, transpose};
use crate::simd::product::{Band, Product, zero_outside};
use crate::simd::rows::padded;
use crate::simd::{Real, dispatch};

/// Rows of the window whose weights are formed at a time: those of the table that they share with the piece's keys begin
/// one further back for every row, and products write whole cache lines.
const BAND_ROWS: usize = 8;

impl<T: Real> KeyWalk<'_, '_, T> {
    /// `φ(q)·ρ(r)` of the window's first `rows` rows, for those rows of the table through which they meet one of `keys`
    /// keys: row `x` meets key `j` through row `R + lead + j − x`. Others are left as they are.
    fn load_relative(&self, head: usize, rows: usize, keys: usize, lead: usize, buffers: &mut KeyBuffers<'_, T>) {
        let (Some(table), Some(radius)) = (&self.table, self.problem.radius) else { return };
        let problem = self.problem;
        let line = padded::<T>(1);
        // In a narrow table there is nothing to leave out.
        let step = if table.width > 2 * line { BAND_ROWS } else { rows.max(1) };
        for row in (0..rows).step_by(step) {
            let last = (row + step).min(rows) - 1;
            let from = (radius + lead).saturating_sub(last) / line * line;
            let to = (radius + lead + keys - row).min(table.count);
            Product::of(
                (&buffers.q[row * problem.head_width..], problem.head_width),
                (&table.columns(head)[from..], table.width),
                (&mut buffers.relative[row * table.width + from..], table.width),
                [last + 1 - row, to - from, problem.depth],
            )
            .compute();
        }
    }

    /// The gradients of the keys `first..first + keys`; of the ring's rows for keys before 0, which have no content.
    #[allow(clippy::too_many_arguments)]
    pub fn piece(
        &self,
        stage: usize,
        first: isize,
        keys: usize,
        start: SummaryRef<'_, T>,
        start_decay: T,
        local: &mut Summary<'_, T>,
        (far, far_count): (&mut [T], &mut T),
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        let problem = self.problem;
        let unit = &self.unit;
        let (head_width, value_width, chunk) = (problem.head_width, problem.value_width, buffers.chunk);
        let exp = problem.exponential;
        let (key, content) = (first.max(0) as usize, problem.content && first >= 0);
        // Without rows at keys there is nothing but what the state brings.
        let met = !self.positions().is_empty();
        let decays = !unit.decay.is_none();
        let near = near_columns(problem);
        let radius = problem.radius.unwrap_or(0);
        let lead = if problem.causal { 0 } else { radius.saturating_sub(1) };
        // Rows whose tile reaches the piece.
        let reach = if near > 0 { keys + near - 1 } else { 0 };
        let content_rows = if content && problem.causal { keys } else { 0 };
        let tile_rows = reach.max(content_rows);
        buffers.decays.load(unit.decay, first, keys, (tile_rows, 0, keys));
        let separate = problem.layout.separate();
        // Gradients of gates ask for what values of 1 would have, which denominators sum up, and states for later ones.
        let counts = self.gates.is_some() && (problem.attention.normalizes() || self.d_final.is_some());
        let (counts, separate_counts) = (counts && separate.is_none(), separate.filter(|_| counts && content));
        buffers.ones.fill(T::ZERO);

        // Keys and values.
        let mut key_shift = T::ZERO;
        if exp && content {
            key_shift = unit.highest(problem, key, key + keys, T::NEG_INFINITY);
            if !key_shift.is_finite() {
                key_shift = T::ZERO;
            }
        }
        if content {
            let rows = padded::<T>(keys);
            let padding = unit.sequence.padding(key..key + keys);
            problem.load_keys(unit, key, keys, Shift::One(key_shift), buffers.k, &mut buffers.lift);
            buffers.k[keys * head_width..rows * head_width].fill(T::ZERO);
            if problem.causal && met {
                let columns = if problem.taylor.is_some() { linear_width(problem) } else { head_width };
                transpose((buffers.k, head_width), (rows, columns), (buffers.k_columns, chunk));
            }
            let v = unit.v.skip(key);
            let value_dim = problem.dims.value_dim;
            copy_rows(v, (keys, value_dim), padding, (buffers.v, value_width));
            buffers.v[keys * value_width..rows * value_width].fill(T::ZERO);
            if problem.causal && met {
                transpose((buffers.v, value_width), (rows, value_width), (buffers.v_columns, chunk));
            }
        }
        let mut written = false;

        // Rows that stand beyond the piece, through the state.
        if content {
            let mut shift = T::ZERO;
            let (mut start_scale, mut local_scale) = (start_decay, T::ONE);
            if exp {
                let top = start.shift().max(local.view().shift());
                if top.is_finite() {
                    let factor = |x: T| if x.is_finite() { (x - top).exp() } else { T::ZERO };
                    start_scale = start_decay * factor(start.shift());
                    local_scale = factor(local.view().shift());
                    shift = top;
                }
            }
            let state = combine_states(buffers.state, (start, start_scale), Some((local.view(), local_scale)));
            if let Some((sum, z)) = state {
                // Without a mask, or without rows, every piece of the stage reads the same.
                if problem.causal && (met || decays || exp) || !buffers.state_transposed {
                    transpose((sum, value_width), (head_width, value_width), (buffers.state_columns, head_width));
                    buffers.state_transposed = true;
                }
                let [next_k, next_v] = problem.keys_ahead(unit, first - chunk as isize, first);
                let (batch, token) = (unit.sequence.batch, unit.sequence.key_start + key);
                let to_k = self.sink.rows.dk.ahead(batch, unit.kv_head, token, keys, problem.dims.head_dim);
                let to_v = self.sink.rows.dv.ahead(batch, unit.kv_head, token, keys, problem.dims.value_dim);
                // Each row of dk has one times z.
                Product::of(
                    (buffers.v, value_width),
                    (buffers.state_columns, head_width),
                    (buffers.dk, head_width),
                    [keys, head_width, problem.dims.value_dim],
                )
                .compute_with(Some((&[T::ONE; CHUNK][..keys], z)), &[next_k, to_k]);
                let sizes = [keys, value_width, problem.depth];
                Product::of((buffers.k, head_width), (sum, value_width), (buffers.dv, value_width), sizes)
                    .compute_with(None, &[next_v, to_v]);
                written = true;
                // Under an exponential map keys and rows meet at e^{κ − M} ≤ 1.
                let lift = if exp { (key_shift + shift).exp() } else { T::ONE };
                if exp || decays {
                    let mut factors = [lift; CHUNK];
                    factors.iter_mut().zip(&*buffers.decays.to_end).for_each(|(to, &decay)| *to = lift * decay);
                    if counts {
                        for (n, to) in buffers.ones[..keys].iter_mut().enumerate() {
                            *to = factors[n] * dot(&buffers.k[n * head_width..][..head_width], z);
                        }
                    }
                    scale_rows((buffers.dk, head_width), head_width, &factors[..keys]);
                    scale_rows((buffers.dv, value_width), value_width, &factors[..keys]);
                }
            }
            local.scale_content(buffers.decays.total());
        }
        if !written {
            buffers.dk[..keys * head_width].fill(T::ZERO);
            buffers.dv[..keys * value_width].fill(T::ZERO);
        }

        // Rows that enter the far sum.
        let first_position = first - lead as isize;
        // R = 0 under a bidirectional mask has one weight for all pairs, which `start` sums up.
        let far_rows = problem.radius.is_some() && (problem.causal || radius > 0);
        let window = if far_rows { tile_rows.max(lead + radius + keys) } else { tile_rows };
        if far_rows {
            let entering = first_position + (lead + radius) as isize;
            self.clear_far_rows(entering, keys, buffers);
            unit.decay.steps(entering, &mut buffers.far_steps[..keys]);
            let KeyBuffers { decays, far_gains, .. } = buffers;
            decays.over(unit.decay, radius, (radius.saturating_sub(1), entering), &mut far_gains[..keys]);
        }
        for head in problem.heads(unit) {
            if window == 0 || !met {
                break;
            }
            self.load_rows(head, first_position, window, buffers);
            let ahead = self.rows_ahead(head, first_position - chunk as isize, first_position);
            if tile_rows > 0 {
                buffers.tile[..tile_rows * chunk].fill(T::ZERO);
                if content_rows > 0 {
                    let (first, depth) = problem.weigh_columns();
                    let (q, k) = (&buffers.q[first..], &buffers.k_columns[first * chunk..]);
                    Product::of((q, head_width), (k, chunk), (buffers.tile, chunk), [content_rows, keys, depth])
                        .c_band(Band::up_to(0))
                        .compute();
                    if let Some(taylor) = problem.taylor {
                        dispatch(Weigh {
                            taylor,
                            rows: content_rows,
                            keys,
                            weights: buffers.tile,
                            row_length: chunk,
                            // The first feature of a key is 1 if it is there.
                            present: &buffers.k_columns[..chunk],
                            slopes: buffers.slopes,
                        });
                    }
                    zero_outside((buffers.tile, chunk), (content_rows, keys), Band::up_to(0));
                    if exp {
                        self.lift_tile(content_rows, key_shift, buffers);
                    }
                }
                if near > 0 {
                    self.load_relative(head, reach, keys, lead, buffers);
                    let table_width = problem.table_width();
                    for x in 0..reach {
                        // Row x meets key column j through table row j − (x − lead) + R, which runs from 1 to `near`.
                        let begin = x as isize - lead as isize - radius as isize + 1;
                        let (from, to) = (begin.max(0) as usize, (begin + near as isize).min(keys as isize));
                        if to <= from as isize {
                            continue;
                        }
                        let to = to as usize;
                        let column = 1 + (from as isize - begin) as usize;
                        let weights = &buffers.relative[x * table_width + column..][..to - from];
                        let factor = match &self.table {
                            Some(table) if exp => (table.shift - buffers.shift[x]).exp(),
                            _ => T::ONE,
                        };
                        // Rows that are not there have features 0 and any factor will do.
                        let factor = if factor.is_finite() { factor } else { T::ZERO };
                        add_scaled(&mut buffers.tile[x * chunk + from..][..to - from], factor, weights);
                    }
                }
                if decays {
                    buffers.decays.apply((buffers.tile, chunk), tile_rows, keys);
                }
                if counts {
                    for x in 0..tile_rows {
                        add_scaled(&mut buffers.ones[..keys], buffers.c[x], &buffers.tile[x * chunk..]);
                    }
                }
                // Key j meets the rows from its own on: near ones, and all of the piece's if content is in the tile.
                let to = if content_rows > radius { Band::ALL.to } else { (lead + radius) as isize };
                let band = Band { from: 0, to };
                Product::of_transposed(
                    (buffers.tile, chunk),
                    (buffers.d, value_width),
                    (buffers.dv, value_width),
                    [keys, value_width, tile_rows],
                )
                .accumulate(true)
                .a_band(band)
                .compute_with(None, &ahead[..2]);
            }
            if far_rows {
                self.add_far_rows(head, lead + radius, keys, 0, buffers);
            }
            if content_rows > 0 {
                let sizes = [content_rows, keys, problem.dims.value_dim];
                Product::of((buffers.d, value_width), (buffers.v_columns, chunk), (buffers.tile, chunk), sizes)
                    .c_band(Band::up_to(0))
                    .compute_with(None, &ahead[2..]);
                for x in 0..if separate.is_some() { 0 } else { content_rows } {
                    let c = buffers.c[x];
                    let line = &mut buffers.tile[x * chunk..][..=x];
                    line.iter_mut().for_each(|w| *w += c);
                    if problem.taylor.is_some() {
                        multiply(line, &buffers.slopes[x * chunk..]);
                    }
                }
                zero_outside((buffers.tile, chunk), (content_rows, keys), Band::up_to(0));
                self.scale_tile(content_rows, keys, key_shift, buffers);
                let (tile, q) = ((&*buffers.tile, chunk), (&*buffers.q, head_width));
                if let Some(taylor) = problem.taylor {
                    let columns = taylor.columns(problem.dims.head_dim);
                    let width = linear_width(problem);
                    let sizes = [keys, columns.end, content_rows];
                    Product::of_transposed(tile, q, (&mut *buffers.linear, width), sizes)
                        .a_band(Band::starting_at(0))
                        .compute();
                    add_columns(columns, keys, (buffers.linear, width), (buffers.dk, head_width));
                } else {
                    let sizes = [keys, separate.unwrap_or(head_width), content_rows];
                    Product::of_transposed(tile, q, (buffers.dk, head_width), sizes)
                        .accumulate(true)
                        .a_band(Band::starting_at(0))
                        .compute();
                }
                if let Some(from) = separate {
                    for x in 0..content_rows {
                        buffers.tile[x * chunk..][..=x].fill(buffers.c[x]);
                    }
                    self.scale_tile(content_rows, keys, key_shift, buffers);
                    Product::of_transposed(
                        (buffers.tile, chunk),
                        (&buffers.q[from..], head_width),
                        (&mut buffers.dk[from..], head_width),
                        [keys, head_width - from, content_rows],
                    )
                    .accumulate(true)
                    .a_band(Band::starting_at(0))
                    .compute();
                }
                self.absorb(keys, &[], local, buffers);
            }
        }
        if far_rows {
            let KeyBuffers { far_rows, far_counts, far_steps, far_gains, ones, dv, .. } = buffers;
            self.run_far(keys, far, (dv, far_gains), far_rows, far_steps);
            for n in (0..keys).rev() {
                *far_count = *far_count * far_steps[n] + far_counts[n];
                if counts {
                    ones[n] += far_gains[n] * *far_count;
                }
            }
            self.sum_far(keys, local, buffers);
        } else if problem.radius.is_some() {
            for n in 0..keys {
                add_scaled(&mut buffers.dv[n * value_width..][..value_width], T::ONE, start.far());
            }
        }

        let KeyBuffers { k, dk, dv, ones, .. } = buffers;
        if first < 0 {
            self.weigh_ring(first, keys, dv, ones);
            self.add_final_ring(first, keys, dv, ones);
            self.store_ring(first, keys, dv, ones);
            return;
        }
        if self.gates.is_some() {
            let values = unit.v.skip(key);
            for (n, to) in ones[..keys].iter_mut().enumerate().filter(|(n, _)| !unit.sequence.ignores(key + n)) {
                *to += dot(values.row(n, problem.dims.value_dim), &dv[n * value_width..]);
                if let Some(from) = separate_counts {
                    let row = n * head_width + from..(n + 1) * head_width;
                    *to += dot(&k[row.clone()], &dk[row]);
                }
            }
        }
        self.add_final_ring(first, keys, dv, ones);
        self.write(stage, (key, keys), content, buffers);
    }

    /// Writes the gradients of the keys `key..key + keys`, or adds them to those of another pass.
    fn write(&self, stage: usize, (key, keys): (usize, usize), content: bool, buffers: &mut KeyBuffers<'_, T>) {
        let (problem, unit) = (self.problem, &self.unit);
        let KeyBuffers { k, dk, dv, lift, ones, .. } = buffers;
        let (mut rows, mut row_length): (&[T], usize) = (&[], 0);
        if content {
            // SAFETY: each (unit, stage) is one task's own, and no other slice of its sums lives here.
            let sums = unsafe { self.sums.row(self.index, stage, 0, problem.sums_len()) };
            (rows, row_length) = problem.pull_back_keys(unit, key, keys, k, dk, sums, self.sink.positions, lift);
        }
        for n in 0..keys {
            let token = unit.sequence.key_start + key + n;
            let batch = unit.sequence.batch;
            // SAFETY: each (batch, key/value head, key) belongs to one unit, segment and piece, so to one task.
            let (to_k, to_v) = unsafe { self.sink.rows.key([batch, unit.kv_head, token], &problem.dims) };
            if let Some(gates) = &self.gates {
                // SAFETY: as above.
                let to = unsafe { gates.row(batch, unit.kv_head, token, 1) };
                to[0] = if unit.sequence.ignores(key + n) { T::ZERO } else { ones[n] };
            }
            match (unit.sequence.ignores(key + n), self.rows) {
                (true, true) => {
                    to_k.fill(T::ZERO);
                    to_v.fill(T::ZERO);
                }
                (true, false) => {}
                (false, true) => {
                    if content {
                        store(&rows[n * row_length..], T::ONE, to_k);
                    } else {
                        to_k.fill(T::ZERO);
                    }
                    store(&dv[n * problem.value_width..], T::ONE, to_v);
                }
                (false, false) => {
                    if content {
                        add_scaled(to_k, T::ONE, &rows[n * row_length..]);
                    }
                    add_scaled(to_v, T::ONE, &dv[n * problem.value_width..]);
                }
            }
        }
    }

    /// Brings the first `rows` rows of the tile to each row's exponent and decay.
    fn scale_tile(&self, rows: usize, keys: usize, key_shift: T, buffers: &mut KeyBuffers<'_, T>) {
        if self.problem.exponential {
            self.lift_tile(rows, key_shift, buffers);
        }
        if !self.unit.decay.is_none() {
            buffers.decays.apply((buffers.tile, buffers.chunk), rows, keys);
        }
    }

    /// Brings the first `rows` rows of the tile, formed from keys at exponent `κ`, to each row's own: `e^{κ − M_i}`.
    fn lift_tile(&self, rows: usize, key_shift: T, buffers: &mut KeyBuffers<'_, T>) {
        for x in 0..rows {
            let factor = (key_shift - buffers.shift[x]).exp();
            let factor = if factor.is_finite() { factor } else { T::ZERO };
            scale_by(&mut buffers.tile[x * buffers.chunk..][..buffers.chunk], factor);
        }
    }
}
