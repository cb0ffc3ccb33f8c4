//! The gradients of a piece of keys and values: from the state of the rows beyond them, from one dense tile of those that stand at them
//! or near, and from a running sum of those that are far.

use super::super::problem::CHUNK;
use super::super::summary::{Summary, SummaryRef};
use super::super::tile::{combine_states, linear_width, near_columns};
use super::key_buffers::KeyBuffers;
use super::key_walk::KeyWalk;
use crate::feature_map::elementwise::{Shift, copy_rows};
use crate::simd::Real;
use crate::simd::block::{add_scaled, dot, multiply, scale_by, scale_rows, store, transpose};
use crate::simd::product::{Band, Product, zero_outside};
use crate::simd::rows::{Ahead, padded};

/// Rows of the window whose weights are formed at a time: those of the table that they share with the piece's keys begin
/// one further back for every row, and products write whole cache lines.
const BAND_ROWS: usize = 8;

/// A piece of keys, and the rows that meet it in one dense tile.
#[derive(Clone, Copy)]
struct KeyPiece<T> {
    /// Negative for rows of the initial state's ring.
    first: isize,
    keys: usize,
    /// Whether features of keys take part.
    content: bool,
    /// Whether rows stand at keys at all; without there is nothing but what the state brings.
    met: bool,
    /// Rows of the window before the one that stands at the first key.
    lead: usize,
    /// Rows of the tile with near weights and with content weights, and the larger number.
    near_rows: usize,
    content_rows: usize,
    tile_rows: usize,
    /// Whether gradients of gates ask for those of values of 1, which denominators sum up, and states for later ones; and from which
    /// feature on, where denominators have features of their own.
    counts: bool,
    separate_counts: Option<usize>,
    /// The exponent subtracted from the keys.
    shift: T,
}

impl<T: Real> KeyPiece<T> {
    fn new(walk: &KeyWalk<'_, '_, T>, first: isize, keys: usize) -> Self {
        let problem = walk.problem;
        let content = problem.content && first >= 0;
        let near = near_columns(problem);
        let near_rows = if near > 0 { keys + near - 1 } else { 0 };
        let content_rows = if content && problem.causal { keys } else { 0 };
        let lead = if problem.causal { 0 } else { problem.radius.unwrap_or(0).saturating_sub(1) };
        let counts = walk.gates.is_some() && (problem.attention.normalizes() || walk.d_final.is_some());
        let separate = problem.layout.separate();
        Self {
            first,
            keys,
            content,
            met: !walk.positions().is_empty(),
            lead,
            near_rows,
            content_rows,
            tile_rows: near_rows.max(content_rows),
            counts: counts && separate.is_none(),
            separate_counts: separate.filter(|_| counts && content),
            shift: T::ZERO,
        }
    }
}

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
        (first, keys): (isize, usize),
        start: (SummaryRef<'_, T>, T),
        local: &mut Summary<'_, T>,
        (far, far_count): (&mut [T], &mut T),
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        let (problem, unit) = (self.problem, &self.unit);
        let value_width = problem.value_width;
        let radius = problem.radius.unwrap_or(0);
        let mut piece = KeyPiece::new(self, first, keys);
        let KeyPiece { lead, tile_rows, content_rows, .. } = piece;
        buffers.decays.load(unit.decay, first, keys, (tile_rows, 0, keys));
        buffers.ones.fill(T::ZERO);
        if piece.content {
            piece.shift = self.load_keys(&piece, buffers);
        }
        if !(piece.content && self.read_state(&piece, start, local, buffers)) {
            buffers.dk[..keys * problem.head_width].fill(T::ZERO);
            buffers.dv[..keys * value_width].fill(T::ZERO);
        }
        if piece.content {
            local.scale_content(buffers.decays.total());
        }

        // R = 0 under a bidirectional mask has one weight for all pairs, which `start` sums up.
        let far_rows = problem.radius.is_some() && (problem.causal || radius > 0);
        let window = if far_rows { tile_rows.max(lead + radius + keys) } else { tile_rows };
        let first_position = first - lead as isize;
        if far_rows {
            let entering = first_position + (lead + radius) as isize;
            self.clear_far_rows(entering, keys, buffers);
            unit.decay.steps(entering, &mut buffers.far_steps[..keys]);
            let KeyBuffers { decays, far_gains, .. } = buffers;
            let near = (radius.saturating_sub(1), entering);
            decays.over(unit.decay, (first, radius), near, &mut far_gains[..keys]);
        }
        for head in problem.heads(unit).filter(|_| window > 0 && piece.met) {
            self.load_rows(head, first_position, window, buffers);
            let ahead = self.rows_ahead(head, first_position - buffers.chunk as isize, first_position);
            if tile_rows > 0 {
                self.fill_tile(head, &piece, buffers);
                // Key j meets the rows from its own on: near ones, and all of the piece's if content is in the tile.
                let to = if content_rows > radius { Band::ALL.to } else { (lead + radius) as isize };
                let (tile, dv) = ((&*buffers.tile, buffers.chunk), (&mut *buffers.dv, value_width));
                Product::of_transposed(tile, (buffers.d, value_width), dv, [keys, value_width, tile_rows])
                    .accumulate(true)
                    .a_band(Band { from: 0, to })
                    .compute_with(None, &ahead[..2]);
            }
            if far_rows {
                self.add_far_rows(head, lead + radius, keys, 0, buffers);
            }
            if content_rows > 0 {
                self.pull_back_tile(&piece, &ahead[2..], buffers);
                self.absorb(keys, &[], local, buffers);
            }
        }
        if far_rows {
            let KeyBuffers { far_rows, far_counts, far_steps, far_gains, ones, dv, .. } = buffers;
            self.run_far(keys, far, (dv, far_gains), far_rows, far_steps);
            for n in (0..keys).rev() {
                *far_count = *far_count * far_steps[n] + far_counts[n];
                if piece.counts {
                    ones[n] += far_gains[n] * *far_count;
                }
            }
            self.sum_far(keys, local, buffers);
        } else if problem.radius.is_some() {
            for n in 0..keys {
                add_scaled(&mut buffers.dv[n * value_width..][..value_width], T::ONE, start.0.far());
            }
        }
        if first < 0 {
            let KeyBuffers { dv, ones, .. } = buffers;
            self.weigh_ring(first, keys, dv, ones);
            self.add_final_ring(first, keys, dv, ones);
            self.store_ring(first, keys, dv, ones);
        } else {
            self.write(stage, &piece, buffers);
        }
    }

    /// Loads keys and values of a piece with content; returns the keys' exponent.
    fn load_keys(&self, piece: &KeyPiece<T>, buffers: &mut KeyBuffers<'_, T>) -> T {
        let (problem, unit) = (self.problem, &self.unit);
        let (head_width, value_width, chunk) = (problem.head_width, problem.value_width, buffers.chunk);
        let (key, keys) = (piece.first as usize, piece.keys);
        let mut shift = T::ZERO;
        if problem.exponential {
            let highest = unit.highest(problem, key, key + keys, T::NEG_INFINITY);
            shift = if highest.is_finite() { highest } else { T::ZERO };
        }
        let rows = padded::<T>(keys);
        problem.load_keys(unit, key, keys, Shift::One(shift), buffers.k, &mut buffers.lift);
        buffers.k[keys * head_width..rows * head_width].fill(T::ZERO);
        let padding = unit.sequence.padding(key..key + keys);
        copy_rows(unit.v.skip(key), (keys, problem.dims.value_dim), padding, (buffers.v, value_width));
        buffers.v[keys * value_width..rows * value_width].fill(T::ZERO);
        if problem.causal && piece.met {
            let columns = if problem.taylor.is_some() { linear_width(problem) } else { head_width };
            transpose((buffers.k, head_width), (rows, columns), (buffers.k_columns, chunk));
            transpose((buffers.v, value_width), (rows, value_width), (buffers.v_columns, chunk));
        }
        shift
    }

    /// Writes what the rows that stand beyond the piece give to its keys, through their state. Returns whether there are any.
    fn read_state(
        &self,
        piece: &KeyPiece<T>,
        (start, start_decay): (SummaryRef<'_, T>, T),
        local: &Summary<'_, T>,
        buffers: &mut KeyBuffers<'_, T>,
    ) -> bool {
        let (problem, unit) = (self.problem, &self.unit);
        let (head_width, value_width, keys) = (problem.head_width, problem.value_width, piece.keys);
        let (exp, decays) = (problem.exponential, !unit.decay.is_none());
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
        let Some((sum, z)) = state else { return false };
        // Without a mask, or without rows, every piece of the stage reads the same.
        if problem.causal && (piece.met || decays || exp) || !buffers.state_transposed {
            transpose((sum, value_width), (head_width, value_width), (buffers.state_columns, head_width));
            buffers.state_transposed = true;
        }
        let [next_k, next_v] = problem.keys_ahead(unit, piece.first - buffers.chunk as isize, piece.first);
        let (batch, token) = (unit.sequence.batch, unit.sequence.key_start + piece.first as usize);
        let to_k = self.sink.rows.dk.ahead(batch, unit.kv_head, token, keys, problem.dims.head_dim);
        let to_v = self.sink.rows.dv.ahead(batch, unit.kv_head, token, keys, problem.dims.value_dim);
        // Each row of `dk` begins with `z`.
        let (state, dk) = ((&*buffers.state_columns, head_width), (&mut *buffers.dk, head_width));
        Product::of((buffers.v, value_width), state, dk, [keys, head_width, problem.dims.value_dim])
            .compute_with(Some((&[T::ONE; CHUNK][..keys], z)), &[next_k, to_k]);
        let dv = (&mut *buffers.dv, value_width);
        Product::of((buffers.k, head_width), (sum, value_width), dv, [keys, value_width, problem.depth])
            .compute_with(None, &[next_v, to_v]);
        if exp || decays {
            // Under an exponential map keys and rows meet at e^{κ − M} ≤ 1.
            let lift = if exp { (piece.shift + shift).exp() } else { T::ONE };
            let mut factors = [lift; CHUNK];
            factors.iter_mut().zip(&*buffers.decays.to_end).for_each(|(to, &decay)| *to = lift * decay);
            if piece.counts {
                for (n, to) in buffers.ones[..keys].iter_mut().enumerate() {
                    *to = factors[n] * dot(&buffers.k[n * head_width..][..head_width], z);
                }
            }
            scale_rows((buffers.dk, head_width), head_width, &factors[..keys]);
            scale_rows((buffers.dv, value_width), value_width, &factors[..keys]);
        }
        true
    }

    /// Fills the tile with the weights of the window's rows for the piece's keys.
    fn fill_tile(&self, head: usize, piece: &KeyPiece<T>, buffers: &mut KeyBuffers<'_, T>) {
        let (problem, chunk) = (self.problem, buffers.chunk);
        let &KeyPiece { keys, lead, near_rows, content_rows, tile_rows, shift, .. } = piece;
        buffers.tile[..tile_rows * chunk].fill(T::ZERO);
        if content_rows > 0 {
            let (k, tile, sizes) = ((&*buffers.k_columns, chunk), (&mut *buffers.tile, chunk), [content_rows, keys]);
            problem.weigh_pairs(buffers.q, k, tile, sizes, buffers.slopes);
            zero_outside((buffers.tile, chunk), (content_rows, keys), Band::up_to(0));
            if problem.exponential {
                self.lift_tile(content_rows, shift, buffers);
            }
        }
        if near_rows > 0 {
            self.load_relative(head, near_rows, keys, lead, buffers);
            let (table_width, near) = (problem.table_width(), near_columns(problem) as isize);
            let radius = problem.radius.unwrap_or(0) as isize;
            for x in 0..near_rows {
                // Row x meets key column j through table row j − (x − lead) + R, which runs from 1 to `near`.
                let begin = x as isize - lead as isize - radius + 1;
                let (from, to) = (begin.max(0), (begin + near).min(keys as isize));
                if to <= from {
                    continue;
                }
                let column = (1 + from - begin) as usize;
                let (from, len) = (from as usize, (to - from) as usize);
                let factor = match &self.table {
                    Some(table) if problem.exponential => (table.shift(head) - buffers.shift[x]).exp(),
                    _ => T::ONE,
                };
                // Rows that are not there have features 0 and any factor will do.
                let factor = if factor.is_finite() { factor } else { T::ZERO };
                let weights = &buffers.relative[x * table_width + column..][..len];
                add_scaled(&mut buffers.tile[x * chunk + from..][..len], factor, weights);
            }
        }
        if !self.unit.decay.is_none() {
            buffers.decays.apply((buffers.tile, chunk), tile_rows, keys);
        }
        if piece.counts {
            for x in 0..tile_rows {
                add_scaled(&mut buffers.ones[..keys], buffers.c[x], &buffers.tile[x * chunk..]);
            }
        }
    }

    /// Turns the tile into the gradients of its content weights, and takes them back to the keys.
    fn pull_back_tile(&self, piece: &KeyPiece<T>, ahead: &[Ahead<T>], buffers: &mut KeyBuffers<'_, T>) {
        let (problem, chunk) = (self.problem, buffers.chunk);
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let &KeyPiece { keys, content_rows: rows, shift, .. } = piece;
        let (v, tile) = ((&*buffers.v_columns, chunk), (&mut *buffers.tile, chunk));
        Product::of((buffers.d, value_width), v, tile, [rows, keys, problem.dims.value_dim])
            .c_band(Band::up_to(0))
            .compute_with(None, ahead);
        let separate = problem.layout.separate();
        for x in 0..if separate.is_some() { 0 } else { rows } {
            let c = buffers.c[x];
            let line = &mut buffers.tile[x * chunk..][..=x];
            line.iter_mut().for_each(|w| *w += c);
            if problem.taylor.is_some() {
                multiply(line, &buffers.slopes[x * chunk..]);
            }
        }
        zero_outside((buffers.tile, chunk), (rows, keys), Band::up_to(0));
        let pull_back = |buffers: &mut KeyBuffers<'_, T>, columns| {
            self.scale_tile(rows, keys, shift, buffers);
            let (tile, to) = ((&*buffers.tile, chunk), (&mut *buffers.dk, &mut *buffers.linear));
            problem.pull_back_pairs(true, tile, buffers.q, to, [keys, rows], columns, true);
        };
        pull_back(buffers, 0..separate.unwrap_or(head_width));
        if let Some(from) = separate {
            for x in 0..rows {
                buffers.tile[x * chunk..][..=x].fill(buffers.c[x]);
            }
            pull_back(buffers, from..head_width);
        }
    }

    /// Writes the gradients of a piece of the call's keys, or adds them to those of another pass.
    fn write(&self, stage: usize, piece: &KeyPiece<T>, buffers: &mut KeyBuffers<'_, T>) {
        let (problem, unit) = (self.problem, &self.unit);
        let KeyBuffers { k, dk, dv, lift, ones, .. } = buffers;
        let (key, keys, head_width, value_width) =
            (piece.first as usize, piece.keys, problem.head_width, problem.value_width);
        if self.gates.is_some() {
            let values = unit.v.skip(key);
            for (n, to) in ones[..keys].iter_mut().enumerate().filter(|(n, _)| !unit.sequence.ignores(key + n)) {
                *to += dot(values.row(n, problem.dims.value_dim), &dv[n * value_width..]);
                if let Some(from) = piece.separate_counts {
                    let row = n * head_width + from..(n + 1) * head_width;
                    *to += dot(&k[row.clone()], &dk[row]);
                }
            }
        }
        self.add_final_ring(piece.first, keys, dv, ones);
        let (mut rows, mut row_length): (&[T], usize) = (&[], 0);
        if piece.content {
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
                    if piece.content {
                        store(&rows[n * row_length..], T::ONE, to_k);
                    } else {
                        to_k.fill(T::ZERO);
                    }
                    store(&dv[n * value_width..], T::ONE, to_v);
                }
                (false, false) => {
                    if piece.content {
                        add_scaled(to_k, T::ONE, &rows[n * row_length..]);
                    }
                    add_scaled(to_v, T::ONE, &dv[n * value_width..]);
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
