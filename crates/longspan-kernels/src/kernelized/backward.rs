//! The chunked backward pass, linear in time and memory.
//!
//! With `dN_i = G_i / D_i` and `c_i = −dN_i·A_i`, the gradient of every weight is `dw_ij = dN_i·v_j + c_i`. Gradients of
//! queries and of the relative table visit the rows as the forward pass does; gradients of keys and values walk the keys
//! the other way, with the state `Σ φ(q_i) dN_iᵀ` of the rows that come later.
//!
//! The gradient of the final state is one more late row to the walk over the keys: that of `S` and `z` joins the state
//! after the last key, that of the far sum is a far row at the last position, that of the ring goes to the values that
//! are in it. The walk then goes on over the ring of the initial state, as keys at −1, −2, …, −R without content; what
//! its sums hold at key 0 and beyond −R are the gradients of `S` and `z` and of the far sum.

use std::sync::{Mutex, PoisonError};

use super::features::{Lift, PositionSink};
use super::forward::{Memory, Place, Scales, Scene, Visitor, Walk, cut, cut_count, first_row, visit_rows};
use super::problem::{Problem, Table, Unit};
use super::state::{Head, SHIFT};
use super::summary::{Carry, Layout, Summary, SummaryRef};
use super::tile::{Buffers, Piece, Sizes, combine_states, near_columns};
use crate::feature_map::FeatureMap;
use crate::feature_map::rows::{RowMap, Shift, Side as MapSide};
use crate::mechanism::Cotangent;
use crate::real::Real;
use crate::scratch::{Arena, Scratch, padded, parallel};
use crate::shape::{Rows, SharedRows, ViewMut};
use crate::shaw::RelativeMap;
use crate::simd::block::{Band, Product, Run};
use crate::state::State;

/// Rows of the window whose weights are formed at a time: those of the table that they share with the piece's keys begin
/// one further back for every row, and products write whole cache lines.
const BAND_ROWS: usize = 8;

/// Where gradients go.
#[derive(Clone, Copy)]
pub(super) struct GradientSink<'a, T> {
    pub dq: SharedRows<'a, T>,
    pub dk: SharedRows<'a, T>,
    pub dv: SharedRows<'a, T>,
    /// For given positions.
    pub positions: Option<PositionSink<'a, T>>,
}

/// What the rows' gradients start from.
#[derive(Clone, Copy)]
struct Source<'a, T> {
    cotangent: &'a Cotangent<'a, T>,
}

impl<'a, T: Real> Source<'a, T> {
    fn rows(&self, unit: &Unit<'_, T>, head: usize) -> (Rows<'a, T>, Rows<'a, T>) {
        let sequence = &unit.sequence;
        let of = |view: &crate::shape::View<'a, T>| view.rows(sequence.batch, head).skip(sequence.query_start);
        (of(&self.cotangent.out), of(&self.cotangent.d_out))
    }

    /// Writes `dN` of `count` rows from `first` into a block and `c` beside it; `scale[n]` multiplies row `n` where the
    /// call does not normalise.
    #[allow(clippy::too_many_arguments)]
    fn load(
        &self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        head: usize,
        first: usize,
        count: usize,
        scale: impl Fn(usize) -> T,
        d: &mut [T],
        c: &mut [T],
    ) {
        let (width, value_dim) = (problem.value_width, problem.dims.value_dim);
        let (out, d_out) = self.rows(unit, head);
        problem.ops.load(FeatureMap::Identity, T::ZERO, d_out.skip(first), count, value_dim, None, d, width);
        let start = (unit.sequence.batch * problem.dims.heads + head) * problem.dims.queries;
        let start = start + unit.sequence.query_start + first;
        for row in 0..count {
            let d = &mut d[row * width..][..width];
            if !problem.attention.normalizes() {
                problem.ops.scale(d, scale(row));
                c[row] = T::ZERO;
                continue;
            }
            let denominator = self.cotangent.denominators[start + row];
            if problem.gives_nothing(denominator) {
                // The row gave 0 whatever the inputs were.
                d.fill(T::ZERO);
                c[row] = T::ZERO;
            } else {
                problem.ops.scale(d, T::ONE / denominator);
                c[row] = -problem.ops.dot(out.row(first + row, value_dim), d);
            }
        }
    }
}

/// Gradients of queries and of the relative table.
struct QueryGradients<'a, 's, T> {
    source: Source<'a, T>,
    sink: GradientSink<'a, T>,
    /// Of this unit and segment, for each head of the unit: of the relative table, `[table width, head_width]`, and the
    /// sums for the parameters of Fourier positions and of the map.
    table: &'s mut [T],
    /// The common exponent of each row's piece, for the walk over the keys; under an exponential map only.
    shifts: &'s mut [T],
}

impl<T: Real> Visitor<T> for QueryGradients<'_, '_, T> {
    fn attend(&mut self, walk: &Walk<'_, '_, T>, piece: &Piece, scene: &Scene<'_, T>, buffers: &mut Buffers<'_, T>) {
        let (problem, unit) = (walk.problem, &walk.unit);
        let ops = problem.ops;
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let scales = Scales::new(problem, walk.table.as_ref(), scene);
        let decays = unit.gamma != 1.0;
        let row_length = buffers.sizes.tile_row;
        let near = near_columns(problem);
        let sequence = &unit.sequence;
        if problem.exponential {
            self.shifts[piece.row..piece.row + piece.rows].fill(scales.shift);
        }

        // Sᵀ and Vᵀ are wanted by every head.
        let mut has_state = false;
        if problem.content {
            let local = scene.local.map(|local| (local, scales.local));
            if let Some((sum, keys)) = combine_states(problem, buffers.state, (scene.start, scales.start), local) {
                ops.transpose(sum, value_width, head_width, value_width, buffers.state_columns, head_width);
                buffers.keys_sum.copy_from_slice(keys);
                has_state = true;
            }
        }
        let separate = problem.layout.separate();
        let tiled = near > 0 || (problem.content && piece.keys > 0);
        if tiled {
            let rows = padded::<T>(piece.window_len);
            ops.transpose(buffers.v, value_width, rows, value_width, buffers.v_columns, buffers.sizes.window);
        }
        let run_sum = std::mem::take(&mut buffers.far);
        for (n, head) in problem.heads(unit).enumerate() {
            let (first, count) = (piece.row, piece.rows);
            problem.load_queries(unit, head, first, count, buffers.q_shift, buffers.q, &mut buffers.lift);
            let q_shift = &*buffers.q_shift;
            let scale = |row: usize| if problem.exponential { (scales.shift + q_shift[row]).exp() } else { T::ONE };
            self.source.load(problem, unit, head, piece.row, piece.rows, scale, buffers.o, buffers.sums);
            let mut written = false;
            if has_state {
                ops.product(&mut Product {
                    a: buffers.o,
                    a_row: value_width,
                    a_column: 1,
                    b: buffers.state_columns,
                    b_row: head_width,
                    c: buffers.dq,
                    c_row: head_width,
                    rows: piece.rows,
                    columns: head_width,
                    depth: problem.dims.value_dim,
                    accumulate: false,
                    a_band: Band::ALL,
                    c_band: Band::ALL,
                });
                for row in 0..piece.rows {
                    let line = &mut buffers.dq[row * head_width..][..head_width];
                    ops.add_scaled(line, buffers.sums[row], buffers.keys_sum);
                    if decays {
                        ops.scale(line, unit.decay(row));
                    }
                }
                written = true;
            }
            if tiled {
                let band = Buffers::tile_band(problem, piece);
                buffers.tile[..piece.rows * row_length].fill(T::ZERO);
                ops.product(&mut Product {
                    a: buffers.o,
                    a_row: value_width,
                    a_column: 1,
                    b: &buffers.v_columns[piece.skip..],
                    b_row: buffers.sizes.window,
                    c: buffers.tile,
                    c_row: row_length,
                    rows: piece.rows,
                    columns: piece.columns(),
                    depth: problem.dims.value_dim,
                    accumulate: false,
                    a_band: Band::ALL,
                    c_band: band,
                });
                for row in 0..if separate.is_some() { 0 } else { piece.rows } {
                    let line = &mut buffers.tile[row * row_length..][..piece.columns()];
                    ops.add_scaled(line, buffers.sums[row], &buffers.present[piece.skip..]);
                }
                ops.mask(buffers.tile, row_length, piece.rows, piece.columns(), band);
                if decays {
                    buffers.decay_tile(problem, piece);
                }
            }
            if let (Some(table), Some(radius)) = (&walk.table, problem.radius) {
                let d_relative = &mut buffers.relative[..piece.rows * table.width];
                d_relative.fill(T::ZERO);
                for row in 0..piece.rows {
                    d_relative[row * table.width + 1..][..near]
                        .copy_from_slice(&buffers.tile[row * row_length + row..][..near]);
                }
                let run = piece.entering(problem, unit, buffers.v);
                run_sum.copy_from_slice(scene.far.0);
                let dots = &mut buffers.dots[..piece.rows];
                dots.fill(T::ZERO);
                ops.running_dots(run_sum, run, buffers.o, value_width, dots);
                let mut count = scene.far.1;
                for row in 0..piece.rows {
                    count += run.gain * buffers.present[row];
                    d_relative[row * table.width] = dots[row] + buffers.sums[row] * count;
                    count *= run.decay;
                }
                if let Some((sums, mut count)) = scene.after {
                    let run = piece.leaving(problem, unit, buffers.v);
                    run_sum.copy_from_slice(sums);
                    dots.fill(T::ZERO);
                    ops.running_dots(run_sum, run, buffers.o, value_width, dots);
                    for row in (0..piece.rows).rev() {
                        count += buffers.present[row + 2 * radius];
                        d_relative[row * table.width + 2 * radius] = dots[row] + buffers.sums[row] * count;
                    }
                }
                if scales.relative != T::ONE {
                    ops.scale(d_relative, scales.relative);
                }
                ops.product(&mut Product {
                    a: d_relative,
                    a_row: table.width,
                    a_column: 1,
                    b: table.rows(head),
                    b_row: head_width,
                    c: buffers.dq,
                    c_row: head_width,
                    rows: piece.rows,
                    columns: head_width,
                    depth: table.count,
                    accumulate: written,
                    a_band: Band::ALL,
                    c_band: Band::ALL,
                });
                written = true;
                let len = table.width * head_width;
                ops.product(&mut Product {
                    a: d_relative,
                    a_row: 1,
                    a_column: table.width,
                    b: buffers.q,
                    b_row: head_width,
                    c: &mut self.table[n * (len + problem.sums_len())..][..len],
                    c_row: head_width,
                    rows: table.count,
                    columns: head_width,
                    depth: piece.rows,
                    accumulate: true,
                    a_band: Band::ALL,
                    c_band: Band::ALL,
                });
            }
            if problem.content && piece.keys > 0 {
                if scales.local != T::ONE {
                    ops.scale(&mut buffers.tile[..piece.rows * row_length], scales.local);
                }
                ops.product(&mut Product {
                    a: &buffers.tile[piece.lead..],
                    a_row: row_length,
                    a_column: 1,
                    b: buffers.k,
                    b_row: head_width,
                    c: buffers.dq,
                    c_row: head_width,
                    rows: piece.rows,
                    columns: separate.unwrap_or(head_width),
                    depth: piece.keys,
                    accumulate: written,
                    a_band: Band::up_to(0),
                    c_band: Band::ALL,
                });
                if let Some(from) = separate {
                    for row in 0..piece.rows {
                        let c = buffers.sums[row] * scales.local;
                        buffers.tile[row * row_length..][..=row].fill(c);
                    }
                    if decays {
                        buffers.decay_tile(problem, piece);
                    }
                    ops.product(&mut Product {
                        a: buffers.tile,
                        a_row: row_length,
                        a_column: 1,
                        b: &buffers.k[from..],
                        b_row: head_width,
                        c: &mut buffers.dq[from..],
                        c_row: head_width,
                        rows: piece.rows,
                        columns: head_width - from,
                        depth: piece.keys,
                        accumulate: written,
                        a_band: Band::up_to(0),
                        c_band: Band::ALL,
                    });
                }
                written = true;
            }
            if !written {
                buffers.dq[..piece.rows * head_width].fill(T::ZERO);
            }
            let head_dim = problem.dims.head_dim;
            let (len, table) = (problem.sums_len(), problem.table_width() * head_width);
            let sums = &mut self.table[n * (table + len) + table..][..len];
            let positions = self.sink.positions;
            let Buffers { q, dq, lift, .. } = &mut *buffers;
            let (rows, row_length) = problem.pull_back_queries(unit, head, first, count, q, dq, sums, positions, lift);
            for row in 0..piece.rows {
                let token = sequence.query_start + piece.row + row;
                // SAFETY: each (batch, head, token) belongs to one sequence, segment and piece, so to one task.
                let to = unsafe { self.sink.dq.row(sequence.batch, head, token, head_dim) };
                ops.store(&rows[row * row_length..], T::ONE, to);
            }
        }
        buffers.far = run_sum;
    }

    fn unseen(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_, T>, head: usize, row: usize) {
        let token = unit.sequence.query_start + row;
        // SAFETY: these rows belong to no segment, and each unit's are written by one task.
        let to = unsafe { self.sink.dq.row(unit.sequence.batch, head, token, problem.dims.head_dim) };
        to.fill(T::ZERO);
    }
}

/// Working memory of the walk over the keys.
struct KeyBuffers<'s, T> {
    chunk: usize,
    /// Rows around a chunk of keys: those whose near band reaches it, and the one far row beyond each.
    window: usize,
    /// `φ(k)` and its transpose, chunk × head_width.
    k: &'s mut [T],
    k_columns: &'s mut [T],
    /// Values and their transpose, chunk × value_width.
    v: &'s mut [T],
    v_columns: &'s mut [T],
    /// `φ(q)` and `dN` of the window's rows, `c` and the exponent each was computed with.
    q: &'s mut [T],
    d: &'s mut [T],
    c: &'s mut [T],
    shift: &'s mut [T],
    /// `φ(q)·ρ(r)`, window × table width.
    relative: &'s mut [T],
    /// Weights, later their gradients: window × chunk.
    tile: &'s mut [T],
    /// Far rows `w·[dN, c]` on their way into the running sum, chunk × value_width and chunk.
    far_rows: &'s mut [T],
    far_counts: &'s mut [T],
    powers: &'s mut [T],
    state: &'s mut [T],
    state_columns: &'s mut [T],
    dk: &'s mut [T],
    dv: &'s mut [T],
    running: &'s mut [T],
    lift: Lift<'s, T>,
}

impl<'s, T: Real> KeyBuffers<'s, T> {
    fn window(problem: &Problem<'_, T>, chunk: usize) -> usize {
        let radius = problem.radius.unwrap_or(0);
        padded::<T>(chunk + if problem.causal { radius } else { 2 * radius })
    }

    fn len(problem: &Problem<'_, T>, chunk: usize) -> usize {
        let window = Self::window(problem, chunk);
        let (head, value) = (problem.head_width, problem.value_width);
        3 * chunk * head
            + 4 * chunk * value
            + window * (head + value + problem.table_width() + chunk)
            + 2 * padded::<T>(window)
            + padded::<T>(window + chunk)
            + padded::<T>(chunk)
            + head * (value + 1)
            + head * value
            + value
            + Lift::len(problem, window)
    }

    fn new(problem: &Problem<'_, T>, chunk: usize, arena: &mut Arena<'s, T>) -> Self {
        let window = Self::window(problem, chunk);
        let (head, value) = (problem.head_width, problem.value_width);
        Self {
            chunk,
            window,
            k: arena.take(chunk * head),
            k_columns: arena.take(chunk * head),
            v: arena.take(chunk * value),
            v_columns: arena.take(chunk * value),
            q: arena.take(window * head),
            d: arena.take(window * value),
            c: arena.take(window),
            shift: arena.take(window),
            relative: arena.take(window * problem.table_width()),
            tile: arena.take(window * chunk),
            far_rows: arena.take(chunk * value),
            far_counts: arena.take(chunk),
            powers: arena.take(window + chunk),
            state: arena.take(head * (value + 1)),
            state_columns: arena.take(head * value),
            dk: arena.take(chunk * head),
            dv: arena.take(chunk * value),
            running: arena.take(value),
            lift: Lift::new(problem, window, arena),
        }
    }
}

/// The walk over the keys of one unit.
struct KeyWalk<'w, 'a, T: 'static> {
    problem: &'w Problem<'a, T>,
    unit: Unit<'a, T>,
    table: Option<Table<'w, T>>,
    source: Source<'w, T>,
    sink: GradientSink<'w, T>,
    /// Its number, and where the gradients of the parameters of Fourier positions go, `[unit, stage]`.
    index: usize,
    sums: SharedRows<'w, T>,
    /// The exponent of each row's piece; under an exponential map only.
    shifts: &'w [T],
    /// Whether the call's rows take part. If not, gradients are added to what another pass wrote.
    rows: bool,
    /// The initial state, the place for its gradient, and the gradient of the final state.
    initial: Option<Head<&'w [T]>>,
    d_initial: Option<&'w Place<'w, T>>,
    d_final: Option<Head<&'w [T]>>,
}

impl<T: Real> KeyWalk<'_, '_, T> {
    /// Rows of the call that stand at a key, as positions `t`.
    fn positions(&self) -> std::ops::Range<isize> {
        if !self.rows {
            return 0..0;
        }
        let first = first_row(self.problem, &self.unit) as isize;
        first + self.problem.offset..self.unit.sequence.queries as isize + self.problem.offset
    }

    /// Loads `count` rows from position `from` on into the window; positions without a row become 0.
    fn load_rows(&self, head: usize, from: isize, count: usize, buffers: &mut KeyBuffers<'_, T>) {
        let problem = self.problem;
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let positions = self.positions();
        let within = |t: isize| (t - from).clamp(0, count as isize) as usize;
        let (a, b) = if positions.is_empty() { (0, 0) } else { (within(positions.start), within(positions.end)) };
        let padded_count = count.next_multiple_of(padded::<T>(1)).min(buffers.window);
        for range in [0..a, b..padded_count] {
            buffers.q[range.start * head_width..range.end * head_width].fill(T::ZERO);
            buffers.d[range.start * value_width..range.end * value_width].fill(T::ZERO);
            buffers.c[range.clone()].fill(T::ZERO);
            buffers.shift[range].fill(T::ZERO);
        }
        if a == b {
            return;
        }
        let row = (from + a as isize - problem.offset) as usize;
        let exp = problem.exponential;
        let q = &mut buffers.q[a * head_width..];
        problem.load_queries(&self.unit, head, row, b - a, &mut buffers.shift[a..], q, &mut buffers.lift);
        if exp {
            for n in 0..b - a {
                // Kept for the scale of an unnormalised row until `shift` takes its final meaning below.
                buffers.shift[a + n] += self.shifts[row + n];
            }
        }
        let shift = &*buffers.shift;
        let scale = |n: usize| if exp { shift[a + n].exp() } else { T::ONE };
        let (d, c) = (&mut buffers.d[a * value_width..], &mut buffers.c[a..]);
        self.source.load(problem, &self.unit, head, row, b - a, scale, d, c);
        for n in a..b {
            buffers.shift[n] = if exp { self.shifts[row + n - a] } else { T::ZERO };
        }
    }

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
            problem.ops.product(&mut Product {
                a: &buffers.q[row * problem.head_width..],
                a_row: problem.head_width,
                a_column: 1,
                b: &table.columns(head)[from..],
                b_row: table.width,
                c: &mut buffers.relative[row * table.width + from..],
                c_row: table.width,
                rows: last + 1 - row,
                columns: to - from,
                depth: problem.depth,
                accumulate: false,
                a_band: Band::ALL,
                c_band: Band::ALL,
            });
        }
    }

    /// Lets the rows of the window's first `rows` positions enter the state: `R += φ(q) dNᵀ`, `z += c φ(q)`.
    fn absorb(&self, rows: usize, local: &mut Summary<'_, T>, buffers: &mut KeyBuffers<'_, T>) {
        let problem = self.problem;
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        if problem.exponential {
            // Row i counts e^{−M_i}; the exponent of the state is the largest −M_i.
            let mut top = *local.shift();
            for row in 0..rows {
                if buffers.q[row * head_width..][..head_width].iter().any(|&x| x != T::ZERO) {
                    top = top.max(-buffers.shift[row]);
                }
            }
            if !top.is_finite() {
                return;
            }
            local.raise(problem, top);
            for row in 0..rows {
                let factor = (-buffers.shift[row] - top).exp();
                let factor = if factor.is_finite() { factor } else { T::ZERO };
                problem.ops.scale(&mut buffers.q[row * head_width..][..head_width], factor);
            }
        }
        if self.unit.gamma != 1.0 {
            for row in 1..rows {
                let factor = self.unit.decay(row);
                problem.ops.scale(&mut buffers.q[row * head_width..][..head_width], factor);
            }
        }
        problem.ops.product(&mut Product {
            a: buffers.q,
            a_row: 1,
            a_column: head_width,
            b: buffers.d,
            b_row: value_width,
            c: local.sum(),
            c_row: value_width,
            rows: problem.depth,
            columns: value_width,
            depth: rows,
            accumulate: true,
            a_band: Band::ALL,
            c_band: Band::ALL,
        });
        let from = problem.layout.denominator();
        for row in 0..rows {
            let q = &buffers.q[row * head_width + from..][..head_width - from];
            problem.ops.add_scaled(&mut local.keys()[from..], buffers.c[row], q);
        }
        local.set_content();
    }

    /// Empties the far rows for the positions `first..first + count`.
    fn clear_far_rows(&self, first: isize, count: usize, buffers: &mut KeyBuffers<'_, T>) {
        let (width, value_dim) = (self.problem.value_width, self.problem.dims.value_dim);
        buffers.far_rows[..count * width].fill(T::ZERO);
        buffers.far_counts[..count].fill(T::ZERO);
        // The final far sum holds key `j` with `γ^{L−j}` up to `j = L − 1 − R`, as a row at `L − 1` holds it with one `γ`
        // less.
        let place = usize::try_from(self.unit.sequence.keys as isize - 1 - first).ok().filter(|&place| place < count);
        if let (Some(state), Some(place)) = (&self.d_final, place)
            && self.unit.sequence.keys > 0
        {
            let decay = self.unit.decay(1);
            let row = &mut buffers.far_rows[place * width..][..value_dim];
            self.problem.ops.add_scaled(row, decay, &state.far[..value_dim]);
            buffers.far_counts[place] = decay * state.far[value_dim];
        }
    }

    /// Adds `w·[dN, c]` of the window's rows `first..first + count` to the far rows, where `w` is their weight for row
    /// `column` of the table.
    ///
    /// The weights are taken as dots, not from `relative`, so that a segment's far sum has the same bits whether its
    /// keys are looked at or only summed up.
    fn add_far_rows(&self, head: usize, first: usize, count: usize, column: usize, buffers: &mut KeyBuffers<'_, T>) {
        let problem = self.problem;
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let Some(table) = &self.table else { return };
        let entry = &table.rows(head)[column * head_width..][..head_width];
        for n in 0..count {
            let row = first + n;
            let mut weight = problem.ops.dot(&buffers.q[row * head_width..][..head_width], entry);
            if problem.exponential && weight != T::ZERO {
                weight *= (table.shift - buffers.shift[row]).exp();
            }
            let d = &buffers.d[row * value_width..][..value_width];
            problem.ops.add_scaled(&mut buffers.far_rows[n * value_width..][..value_width], weight, d);
            buffers.far_counts[n] += weight * buffers.c[row];
        }
    }

    /// Sums up the rows of a stage that come before any key is looked at.
    fn sum_rows(
        &self,
        (from, to): (isize, isize),
        (content, far): (bool, Option<usize>),
        local: &mut Summary<'_, T>,
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        local.clear();
        let mut end = to;
        while end > from {
            let start = (end - buffers.chunk as isize).max(from);
            self.pass(start, (end - start) as usize, content, far, local, buffers);
            end = start;
        }
    }

    /// Lets `count` positions from `start` on pass: rows at them enter the state, rows `far` later the far sum.
    fn pass(
        &self,
        start: isize,
        count: usize,
        content: bool,
        far: Option<usize>,
        local: &mut Summary<'_, T>,
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        let problem = self.problem;
        if content {
            local.scale_content(problem, self.unit.decay(count));
            for head in problem.heads(&self.unit) {
                self.load_rows(head, start, count, buffers);
                self.absorb(count, local, buffers);
            }
        }
        if let Some(lag) = far {
            self.clear_far_rows(start + lag as isize, count, buffers);
            for head in problem.heads(&self.unit) {
                self.load_rows(head, start + lag as isize, count, buffers);
                self.add_far_rows(head, 0, count, 0, buffers);
            }
            self.sum_far(count, local, buffers);
        }
    }

    /// Runs the far sum down over `count` far rows, and adds it to those of `to` with the weight `gain`. At a position
    /// it is `Σ γⁿ` times the far rows from there on, `n` positions away.
    fn run_far(&self, count: usize, far: &mut [T], (to, gain): (&mut [T], T), rows: &[T]) {
        let (ops, width, decay) = (self.problem.ops, self.problem.value_width, self.unit.decay(1));
        let Some(others) = count.checked_sub(1) else { return };
        if decay != T::ONE {
            ops.scale(far, decay);
        }
        // The first position, which comes last, is not followed by a decay.
        let (first, rows) = rows.split_at(width);
        let (to_first, to) = to.split_at_mut(width.min(to.len()));
        let weights = &[gain];
        let run =
            Run { rows, row_length: width, count: others, reverse: true, gain: T::ONE, decay, weights, weight_step: 0 };
        ops.add_running(far, run, to, width);
        ops.add_scaled(far, T::ONE, first);
        if !to_first.is_empty() {
            ops.add_scaled(to_first, gain, far);
        }
    }

    /// Runs the far sum of a summary down over `count` far rows.
    fn sum_far(&self, count: usize, local: &mut Summary<'_, T>, buffers: &KeyBuffers<'_, T>) {
        self.run_far(count, local.far(), (&mut [], T::ZERO), buffers.far_rows);
        let decay = self.unit.decay(1);
        let total = local.count();
        for &term in buffers.far_counts[..count].iter().rev() {
            *total = *total * decay + term;
        }
    }

    /// Walks the keys of a stage, last to first; `local` becomes the summary of the rows that stand at them. Their
    /// gradients are written if `start`, the state of all rows that stand beyond them, is given.
    fn keys(
        &self,
        stage: Stage,
        start: Option<SummaryRef<'_, T>>,
        local: &mut Summary<'_, T>,
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        let problem = self.problem;
        local.clear();
        let Stage { from, to, .. } = stage;
        let far = std::mem::take(&mut buffers.running);
        if let Some(start) = start {
            far.copy_from_slice(start.far());
        }
        let mut end = to;
        while end > from {
            let begin = (end - buffers.chunk as isize).max(from);
            // Pieces from the chunk's first key on, the last one first.
            let mut cuts = vec![begin];
            let mut at = begin + self.piece_len(begin, end) as isize;
            while at < end {
                cuts.push(at);
                at += self.piece_len(at, end) as isize;
            }
            let mut stop = end;
            for &at in cuts.iter().rev() {
                let count = (stop - at) as usize;
                if let Some(start) = start {
                    let decay = self.unit.decay((to - stop) as usize);
                    self.piece(stage.number, at, count, start, decay, local, far, buffers);
                } else {
                    let far = problem.radius.filter(|&radius| problem.causal || radius > 0);
                    let content = problem.content && problem.causal && at >= 0;
                    self.pass(at, count, content, far, local, buffers);
                }
                stop = at;
            }
            end = begin;
        }
        buffers.running = far;
    }

    /// How many keys from `at` one dense tile may hold: all up to `end`, unless a row's inputs are not finite (then one,
    /// so that 0 · NaN reaches no key that the row does not see) or a key rises far above the first.
    fn piece_len(&self, at: isize, end: isize) -> usize {
        let problem = self.problem;
        let all = (end - at) as usize;
        // Every row sees the ring of the initial state.
        let Ok(key) = usize::try_from(at) else { return all };
        if !problem.causal {
            return all;
        }
        let positions = self.positions();
        let from = at.max(positions.start);
        let count = (end.min(positions.end) - from).max(0) as usize;
        if count > 0 {
            let row = (from - problem.offset) as usize;
            for head in problem.heads(&self.unit) {
                let (out, d_out) = self.source.rows(&self.unit, head);
                let q = problem.queries(&self.unit, head);
                let dv = problem.dims.value_dim;
                let finite = problem.mapping.all_finite(q.skip(row), count)
                    && problem.ops.all_finite(d_out.skip(row), count, dv)
                    && problem.ops.all_finite(out.skip(row), count, dv);
                if !finite {
                    return 1;
                }
            }
        }
        if problem.content && problem.exponential {
            return self.unit.exp_piece(problem, key, key + all, T::NEG_INFINITY).0;
        }
        all
    }

    /// The gradients of the keys `first..first + keys`; of the ring's rows for keys before 0, which have no content.
    #[allow(clippy::too_many_arguments)]
    fn piece(
        &self,
        stage: usize,
        first: isize,
        keys: usize,
        start: SummaryRef<'_, T>,
        start_decay: T,
        local: &mut Summary<'_, T>,
        far: &mut [T],
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        let problem = self.problem;
        let ops = problem.ops;
        let unit = &self.unit;
        let (head_width, value_width, chunk) = (problem.head_width, problem.value_width, buffers.chunk);
        let exp = problem.exponential;
        let (key, content) = (first.max(0) as usize, problem.content && first >= 0);
        let decays = unit.gamma != 1.0;
        let near = near_columns(problem);
        let radius = problem.radius.unwrap_or(0);
        let lead = if problem.causal { 0 } else { radius.saturating_sub(1) };

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
            let padding = unit.padding(key, key + keys);
            problem.load_keys(unit, key, keys, Shift::One(key_shift), buffers.k, &mut buffers.lift);
            buffers.k[keys * head_width..rows * head_width].fill(T::ZERO);
            ops.transpose(buffers.k, head_width, rows, head_width, buffers.k_columns, chunk);
            let v = unit.v.skip(key);
            let value_dim = problem.dims.value_dim;
            ops.load(FeatureMap::Identity, T::ZERO, v, keys, value_dim, padding, buffers.v, value_width);
            buffers.v[keys * value_width..rows * value_width].fill(T::ZERO);
            ops.transpose(buffers.v, value_width, rows, value_width, buffers.v_columns, chunk);
        }
        buffers.dk[..keys * head_width].fill(T::ZERO);
        buffers.dv[..keys * value_width].fill(T::ZERO);

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
            let state = combine_states(problem, buffers.state, (start, start_scale), Some((local.view(), local_scale)));
            if let Some((sum, z)) = state {
                ops.transpose(sum, value_width, head_width, value_width, buffers.state_columns, head_width);
                ops.product(&mut Product {
                    a: buffers.v,
                    a_row: value_width,
                    a_column: 1,
                    b: buffers.state_columns,
                    b_row: head_width,
                    c: buffers.dk,
                    c_row: head_width,
                    rows: keys,
                    columns: head_width,
                    depth: problem.dims.value_dim,
                    accumulate: true,
                    a_band: Band::ALL,
                    c_band: Band::ALL,
                });
                ops.product(&mut Product {
                    a: buffers.k,
                    a_row: head_width,
                    a_column: 1,
                    b: sum,
                    b_row: value_width,
                    c: buffers.dv,
                    c_row: value_width,
                    rows: keys,
                    columns: value_width,
                    depth: problem.depth,
                    accumulate: true,
                    a_band: Band::ALL,
                    c_band: Band::ALL,
                });
                // Under an exponential map keys and rows meet at e^{κ − M} ≤ 1.
                let lift = if exp { (key_shift + shift).exp() } else { T::ONE };
                for n in 0..keys {
                    let dk = &mut buffers.dk[n * head_width..][..head_width];
                    ops.add_scaled(dk, T::ONE, z);
                    let factor = lift * unit.decay(keys - n);
                    if factor != T::ONE {
                        ops.scale(dk, factor);
                        ops.scale(&mut buffers.dv[n * value_width..][..value_width], factor);
                    }
                }
            }
            local.scale_content(problem, unit.decay(keys));
        }

        // Rows whose tile reaches the piece, and those that enter the far sum.
        let reach = if near > 0 { keys + near - 1 } else { 0 };
        let content_rows = if content && problem.causal { keys } else { 0 };
        let tile_rows = reach.max(content_rows);
        let first_position = first - lead as isize;
        // R = 0 under a bidirectional mask has one weight for all pairs, which `start` sums up.
        let far_rows = problem.radius.is_some() && (problem.causal || radius > 0);
        let window = if far_rows { tile_rows.max(lead + radius + keys) } else { tile_rows };
        if far_rows {
            self.clear_far_rows(first_position + (lead + radius) as isize, keys, buffers);
        }
        for head in problem.heads(unit) {
            if window == 0 {
                break;
            }
            self.load_rows(head, first_position, window, buffers);
            if tile_rows > 0 {
                buffers.tile[..tile_rows * chunk].fill(T::ZERO);
                if content_rows > 0 {
                    ops.product(&mut Product {
                        a: buffers.q,
                        a_row: head_width,
                        a_column: 1,
                        b: buffers.k_columns,
                        b_row: chunk,
                        c: buffers.tile,
                        c_row: chunk,
                        rows: content_rows,
                        columns: keys,
                        depth: problem.depth,
                        accumulate: false,
                        a_band: Band::ALL,
                        c_band: Band::up_to(0),
                    });
                    ops.mask(buffers.tile, chunk, content_rows, keys, Band::up_to(0));
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
                        ops.add_scaled(&mut buffers.tile[x * chunk + from..][..to - from], factor, weights);
                    }
                }
                if decays {
                    self.decay_tile(tile_rows, keys, buffers);
                }
                // Key j meets the rows from its own on: near ones, and all of the piece's if content is in the tile.
                let to = if content_rows > radius { Band::ALL.to } else { (lead + radius) as isize };
                let band = Band { from: 0, to };
                ops.product(&mut Product {
                    a: buffers.tile,
                    a_row: 1,
                    a_column: chunk,
                    b: buffers.d,
                    b_row: value_width,
                    c: buffers.dv,
                    c_row: value_width,
                    rows: keys,
                    columns: value_width,
                    depth: tile_rows,
                    accumulate: true,
                    a_band: band,
                    c_band: Band::ALL,
                });
            }
            if far_rows {
                self.add_far_rows(head, lead + radius, keys, 0, buffers);
            }
            if content_rows > 0 {
                ops.product(&mut Product {
                    a: buffers.d,
                    a_row: value_width,
                    a_column: 1,
                    b: buffers.v_columns,
                    b_row: chunk,
                    c: buffers.tile,
                    c_row: chunk,
                    rows: content_rows,
                    columns: keys,
                    depth: problem.dims.value_dim,
                    accumulate: false,
                    a_band: Band::ALL,
                    c_band: Band::up_to(0),
                });
                let separate = problem.layout.separate();
                for x in 0..if separate.is_some() { 0 } else { content_rows } {
                    let c = buffers.c[x];
                    buffers.tile[x * chunk..][..=x].iter_mut().for_each(|w| *w += c);
                }
                ops.mask(buffers.tile, chunk, content_rows, keys, Band::up_to(0));
                self.scale_tile(content_rows, keys, key_shift, buffers);
                ops.product(&mut Product {
                    a: buffers.tile,
                    a_row: 1,
                    a_column: chunk,
                    b: buffers.q,
                    b_row: head_width,
                    c: buffers.dk,
                    c_row: head_width,
                    rows: keys,
                    columns: separate.unwrap_or(head_width),
                    depth: content_rows,
                    accumulate: true,
                    a_band: Band::starting_at(0),
                    c_band: Band::ALL,
                });
                if let Some(from) = separate {
                    for x in 0..content_rows {
                        buffers.tile[x * chunk..][..=x].fill(buffers.c[x]);
                    }
                    self.scale_tile(content_rows, keys, key_shift, buffers);
                    ops.product(&mut Product {
                        a: buffers.tile,
                        a_row: 1,
                        a_column: chunk,
                        b: &buffers.q[from..],
                        b_row: head_width,
                        c: &mut buffers.dk[from..],
                        c_row: head_width,
                        rows: keys,
                        columns: head_width - from,
                        depth: content_rows,
                        accumulate: true,
                        a_band: Band::starting_at(0),
                        c_band: Band::ALL,
                    });
                }
                self.absorb(keys, local, buffers);
            }
        }
        if far_rows {
            self.run_far(keys, far, (buffers.dv, unit.decay(radius)), buffers.far_rows);
            self.sum_far(keys, local, buffers);
        } else if problem.radius.is_some() {
            for n in 0..keys {
                ops.add_scaled(&mut buffers.dv[n * value_width..][..value_width], T::ONE, start.far());
            }
        }

        self.add_final_ring(first, keys, buffers.dv);
        if first < 0 {
            self.store_ring(first, keys, buffers.dv);
            return;
        }
        // Out.
        let KeyBuffers { k, dk, dv, lift, .. } = &mut *buffers;
        let (mut rows, mut row_length): (&[T], usize) = (&[], 0);
        if content {
            // SAFETY: each (unit, stage) is one task's own, and no other slice of its sums lives here.
            let sums = unsafe { self.sums.row(self.index, stage, 0, problem.sums_len()) };
            (rows, row_length) = problem.pull_back_keys(unit, key, keys, k, dk, sums, self.sink.positions, lift);
        }
        for n in 0..keys {
            let token = unit.sequence.key_start + key + n;
            let (head_dim, value_dim) = (problem.dims.head_dim, problem.dims.value_dim);
            // SAFETY: each (batch, key/value head, key) belongs to one unit, segment and piece, so to one task.
            let (to_k, to_v) = unsafe {
                (
                    self.sink.dk.row(unit.sequence.batch, unit.kv_head, token, head_dim),
                    self.sink.dv.row(unit.sequence.batch, unit.kv_head, token, value_dim),
                )
            };
            match (unit.ignores(key + n), self.rows) {
                (true, true) => {
                    to_k.fill(T::ZERO);
                    to_v.fill(T::ZERO);
                }
                (true, false) => {}
                (false, true) => {
                    if content {
                        ops.store(&rows[n * row_length..], T::ONE, to_k);
                    } else {
                        to_k.fill(T::ZERO);
                    }
                    ops.store(&dv[n * value_width..], T::ONE, to_v);
                }
                (false, false) => {
                    if content {
                        ops.add_scaled(to_k, T::ONE, &rows[n * row_length..]);
                    }
                    ops.add_scaled(to_v, T::ONE, &dv[n * value_width..]);
                }
            }
        }
    }

    /// Brings the first `rows` rows of the tile to each row's exponent and decay.
    fn scale_tile(&self, rows: usize, keys: usize, key_shift: T, buffers: &mut KeyBuffers<'_, T>) {
        if self.problem.exponential {
            self.lift_tile(rows, key_shift, buffers);
        }
        if self.unit.gamma != 1.0 {
            self.decay_tile(rows, keys, buffers);
        }
    }

    /// Adds the gradient of the final state's ring to that of the values `first..first + count`.
    fn add_final_ring(&self, first: isize, count: usize, dv: &mut [T]) {
        let (Some(state), Some(radius)) = (&self.d_final, self.problem.radius) else { return };
        let (width, value_dim) = (self.problem.value_width, self.problem.dims.value_dim);
        let oldest = self.unit.sequence.keys as isize - radius as isize;
        for n in 0..count {
            let slot = usize::try_from(first + n as isize - oldest).ok().filter(|&slot| slot < radius);
            if let Some(slot) = slot {
                let row = &state.ring[slot * (value_dim + 1)..][..value_dim];
                self.problem.ops.add_scaled(&mut dv[n * width..][..value_dim], T::ONE, row);
            }
        }
    }

    /// Stores the gradient of the initial ring's rows at `first..first + count`, all before 0.
    fn store_ring(&self, first: isize, count: usize, dv: &[T]) {
        let (Some(initial), Some(place)) = (&self.initial, self.d_initial) else { return };
        let value_dim = self.problem.dims.value_dim;
        let mut d_initial = place.lock().unwrap_or_else(PoisonError::into_inner);
        for n in 0..count {
            let back = (-first) as usize - n;
            // Rows of ignored keys, and those before the first token, are not there.
            if let Some(row) = initial.ring_place(back, value_dim + 1)
                && initial.ring[row.end - 1] != T::ZERO
            {
                let from = &dv[n * self.problem.value_width..][..value_dim];
                d_initial.ring[row][..value_dim].copy_from_slice(from);
            }
        }
    }

    /// Makes `local` the gradient of the final `S` and `z`.
    fn load_final(&self, local: &mut Summary<'_, T>) {
        local.clear();
        let Some(state) = self.d_final else { return };
        local.load(state, self.problem.dims.value_dim);
        // The far sum comes in by a row of its own.
        local.far().fill(T::ZERO);
        *local.count() = T::ZERO;
        if self.problem.exponential {
            let before = self.initial.map_or(T::NEG_INFINITY, |state| state.marks[SHIFT]);
            let keys = if self.problem.content { self.unit.sequence.keys } else { 0 };
            let shift = self.unit.highest(self.problem, 0, keys, before);
            if shift.is_finite() {
                *local.shift() = -shift;
            } else {
                local.clear();
            }
        }
    }

    /// Stores the gradient of the initial `S` and `z`, given the sums at key 0.
    fn store_content(&self, sums: SummaryRef<'_, T>) {
        let (Some(initial), Some(place)) = (&self.initial, self.d_initial) else { return };
        let (width, value_dim) = (self.problem.value_width, self.problem.dims.value_dim);
        let mut lift = T::ONE;
        if self.problem.exponential {
            let exponent = initial.marks[SHIFT] + sums.shift();
            lift = if exponent.is_finite() { exponent.exp() } else { T::ZERO };
        }
        let mut d_initial = place.lock().unwrap_or_else(PoisonError::into_inner);
        let Head { sum, keys, .. } = &mut *d_initial;
        let layout = self.problem.layout;
        for (feature, to) in sum.chunks_exact_mut(value_dim.max(1)).enumerate() {
            self.problem.ops.store(&sums.sum()[layout.place(feature) * width..], lift, to);
        }
        for (feature, to) in keys.iter_mut().enumerate() {
            *to = sums.keys()[layout.denominator() + layout.place(feature)] * lift;
        }
    }

    /// Stores the gradient of the initial far sum, given the sums at the oldest row of the ring.
    fn store_far(&self, sums: SummaryRef<'_, T>) {
        let Some(place) = self.d_initial.filter(|_| self.problem.radius.is_some()) else { return };
        let value_dim = self.problem.dims.value_dim;
        let mut d_initial = place.lock().unwrap_or_else(PoisonError::into_inner);
        let far = &mut *d_initial.far;
        far[..value_dim].copy_from_slice(&sums.far()[..value_dim]);
        far[value_dim] = sums.count();
        if let Some(state) = self.d_final.filter(|_| self.unit.sequence.keys == 0) {
            // No key has let the far sum fall; it is handed on as it is.
            self.problem.ops.add_scaled(far, T::ONE, state.far);
        }
    }

    /// Forms the summary of a stage in `local`, and writes the gradients of its keys if given what the stage starts from.
    fn visit(
        &self,
        stage: Stage,
        start: Option<SummaryRef<'_, T>>,
        local: &mut Summary<'_, T>,
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        match stage.work {
            Work::Rows { content, far } => self.sum_rows((stage.from, stage.to), (content, far), local, buffers),
            Work::FinalState => self.load_final(local),
            Work::Keys | Work::InitialState => self.keys(stage, start, local, buffers),
        }
    }

    /// Lets a stage's summary enter the sums of all later ones; `last` ones may stay as they are.
    fn leave(&self, stage: Stage, last: bool, carry: &mut Carry<'_, T>, local: SummaryRef<'_, T>) {
        let initial = stage.work == Work::InitialState;
        if initial {
            self.store_content(carry.high.view());
        }
        if initial || !last {
            carry.add(self.problem, &self.unit, stage.passes(self.problem), local);
        }
        if initial {
            self.store_far(carry.high.view());
        }
    }

    /// Brings the first `rows` rows of the tile, formed from keys at exponent `κ`, to each row's own: `e^{κ − M_i}`.
    fn lift_tile(&self, rows: usize, key_shift: T, buffers: &mut KeyBuffers<'_, T>) {
        for x in 0..rows {
            let factor = (key_shift - buffers.shift[x]).exp();
            let factor = if factor.is_finite() { factor } else { T::ZERO };
            self.problem.ops.scale(&mut buffers.tile[x * buffers.chunk..][..buffers.chunk], factor);
        }
    }

    /// Multiplies each weight of the tile by `γ^{x − j}`; there is no other tile than a causal one that decays.
    fn decay_tile(&self, rows: usize, keys: usize, buffers: &mut KeyBuffers<'_, T>) {
        let last = buffers.powers.len() - 1;
        for x in 0..rows {
            let len = keys.min(x + 1);
            let powers = &buffers.powers[last - x..][..len];
            self.problem.ops.multiply(&mut buffers.tile[x * buffers.chunk..][..len], powers);
        }
    }

    /// What is left once every key has been walked over.
    fn finish(&self, buffers: &mut KeyBuffers<'_, T>) {
        if !self.rows {
            return;
        }
        self.add_rows_before(buffers);
        let sequence = &self.unit.sequence;
        for token in sequence.key_start + sequence.keys..sequence.key_start + sequence.keys + sequence.absent {
            let dims = &self.problem.dims;
            // SAFETY: all of a unit's keys belong to the task that calls.
            unsafe {
                self.sink.dk.row(sequence.batch, self.unit.kv_head, token, dims.head_dim).fill(T::ZERO);
                self.sink.dv.row(sequence.batch, self.unit.kv_head, token, dims.value_dim).fill(T::ZERO);
            }
        }
    }

    /// Adds the share of rows that stand `R` or more before a key (bidirectional), first key to last.
    fn add_rows_before(&self, buffers: &mut KeyBuffers<'_, T>) {
        let problem = self.problem;
        let Some(radius) = problem.radius.filter(|&radius| radius > 0 && !problem.causal) else { return };
        let unit = &self.unit;
        let width = problem.value_width;
        let far = std::mem::take(&mut buffers.running);
        far.fill(T::ZERO);
        let lag = |key: usize| key as isize - radius as isize;
        // Rows that stand more than R before key 0; under a far offset they end long before it.
        let std::ops::Range { start: mut position, end } = self.positions();
        let end = lag(0).min(end);
        while position < end {
            let count = ((end - position) as usize).min(buffers.chunk);
            self.run_before(position, count, radius, far, false, buffers);
            position += count as isize;
        }
        let mut key = 0;
        while key < unit.sequence.keys {
            let keys = (unit.sequence.keys - key).min(buffers.chunk);
            buffers.dv[..keys * width].fill(T::ZERO);
            self.run_before(lag(key), keys, radius, far, true, buffers);
            for n in (0..keys).filter(|&n| !unit.ignores(key + n)) {
                let token = unit.sequence.key_start + key + n;
                // SAFETY: all of a unit's keys belong to the task that calls.
                let dv = unsafe { self.sink.dv.row(unit.sequence.batch, unit.kv_head, token, problem.dims.value_dim) };
                problem.ops.add_scaled(dv, T::ONE, &buffers.dv[n * width..]);
            }
            key += keys;
        }
        buffers.running = far;
    }

    fn run_before(
        &self,
        from: isize,
        count: usize,
        radius: usize,
        far: &mut [T],
        writes: bool,
        buffers: &mut KeyBuffers<'_, T>,
    ) {
        let width = self.problem.value_width;
        for (n, head) in self.problem.heads(&self.unit).enumerate() {
            self.load_rows(head, from, count, buffers);
            if n == 0 {
                buffers.far_rows[..count * width].fill(T::ZERO);
                buffers.far_counts[..count].fill(T::ZERO);
            }
            self.add_far_rows(head, 0, count, 2 * radius, buffers);
        }
        let run = Run {
            rows: buffers.far_rows,
            row_length: width,
            count,
            reverse: false,
            gain: T::ONE,
            decay: T::ONE,
            weights: &[T::ONE],
            weight_step: 0,
        };
        let to: &mut [T] = if writes { buffers.dv } else { &mut [] };
        self.problem.ops.add_running(far, run, to, width);
    }
}

/// Part of a walk over the keys.
#[derive(Debug, Clone, Copy)]
struct Stage {
    /// Positions, or keys.
    from: isize,
    to: isize,
    work: Work,
    /// Positions without row or key between the stage before and this one.
    idle: usize,
    /// Its place among the unit's stages.
    number: usize,
}

/// What a stage does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    /// Rows that only enter the sums: whether the state, and how many positions later the far sum.
    Rows { content: bool, far: Option<usize> },
    /// The gradient of the final state enters the sums.
    FinalState,
    /// Keys whose gradients are wanted.
    Keys,
    /// The ring of the initial state, and all that the state holds beside it.
    InitialState,
}

/// The stages of a unit in the order of the walk: rows that every key must know of first, then the keys, last to first.
fn stages<T: Real>(walk: &KeyWalk<'_, '_, T>) -> Vec<Stage> {
    let problem = walk.problem;
    let keys = walk.unit.sequence.keys as isize;
    let positions = walk.positions();
    let mut list = Vec::new();
    let mut add = |from: isize, to: isize, work: Work| {
        let (from, to) = (from, to.max(from));
        let mut parts = cut(problem, 0, (to - from) as usize, 0, false);
        parts.reverse();
        let place = |at: usize| from + at as isize;
        list.extend(parts.into_iter().map(|part| Stage {
            from: place(part.from),
            to: place(part.to),
            work,
            idle: 0,
            number: 0,
        }));
    };
    let mut idle = 0;
    if !positions.is_empty() {
        let reach = problem.radius.unwrap_or(0) as isize;
        let mut rows = |from, to, content, far| add(from, to, Work::Rows { content, far });
        if problem.causal {
            let from = keys.max(positions.start - reach);
            rows(from, positions.end, problem.content, problem.radius);
            if positions.end > from {
                idle = (from - keys) as usize;
            }
        } else {
            if problem.content {
                rows(positions.start, positions.end, true, None);
            }
            match problem.radius {
                Some(0) => rows(positions.start, positions.end, false, Some(0)),
                Some(radius) => rows(keys.max(positions.start - reach), positions.end - reach, false, Some(radius)),
                None => {}
            }
        }
    }
    let end = |from: isize, to: isize, work: Work| Stage { from, to, work, idle: 0, number: 0 };
    let rows = list.len();
    if walk.d_final.is_some() {
        list.push(end(keys, keys, Work::FinalState));
    }
    let mut parts = cut(problem, 0, keys as usize, 0, true);
    parts.reverse();
    list.extend(parts.into_iter().map(|part| end(part.from as isize, part.to as isize, Work::Keys)));
    if walk.d_initial.is_some() {
        list.push(end(-(problem.radius.unwrap_or(0) as isize), 0, Work::InitialState));
    }
    if let Some(stage) = list.get_mut(rows) {
        stage.idle = idle;
    }
    list.iter_mut().enumerate().for_each(|(number, stage)| stage.number = number);
    list
}

/// Adds what the final state hands back to the gradients of keys and values that another algorithm wrote.
pub(super) fn add_final_state<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let keys = KeyMemory::new(problem);
    let len = keys.len(problem, rayon::current_num_threads());
    let stages = KeyMemory::most_stages(problem);
    let sums_len = problem.sums_len();
    let [_, positions_len] = problem.position_lens();
    let shared = problem.units() * stages * sums_len + positions_len + 2 * padded::<T>(1);
    let mut arena = Arena::new(scratch.take(problem.table_len() + shared + len));
    let table = problem.table(&mut arena);
    let key_sums = arena.take(problem.units() * stages * sums_len);
    key_sums.fill(T::ZERO);
    let key_positions = arena.take(positions_len);
    let mut positions = problem.position_views(&mut [], key_positions);
    let sink = GradientSink { positions: positions.as_mut().map(|[q, k]| PositionSink::new(q, k)), ..sink };
    let mut sums = ViewMut::strided(&mut *key_sums, [stages * sums_len, sums_len, 0]);
    let sums = sums.shared();
    let walk = |index: usize| {
        let unit = problem.unit(index);
        let d_final = cotangent.final_state.map(|state| unit.head(state));
        let (source, shifts) = (Source { cotangent }, &[][..]);
        KeyWalk {
            index,
            sums,
            problem,
            unit,
            table,
            source,
            sink,
            shifts,
            rows: false,
            initial: None,
            d_initial: None,
            d_final,
        }
    };
    keys.run(problem, &walk, arena.rest());
    let key_sums =
        |index: usize| (0..stages).map(|n| &key_sums[(index * stages + n) * sums_len..][..sums_len]).collect();
    problem.write_feature_gradients(&|_, _| Vec::new(), &key_sums, [&[], key_positions], true, parameters);
}

/// Computes every gradient of a call.
pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    parameters: &mut [&mut [T]],
    d_initial: Option<&mut State<T>>,
    scratch: &mut Scratch<T>,
) {
    let units = problem.units();
    let group = problem.dims.group();
    let workers = rayon::current_num_threads();
    let exp = problem.exponential;
    let longest = problem.sequences.iter().map(|s| s.queries).max().unwrap_or(0);
    let row_segments = |index: usize| -> usize { row_segments(problem, &problem.unit(index)) };
    // A unit whose rows all see nothing is visited too.
    let most_segments = (0..units).map(row_segments).max().unwrap_or(0).max(1);

    let entry = problem.table_width() * problem.head_width + problem.sums_len();
    let per_unit_table = most_segments * group * entry;
    let per_unit_shifts = if exp { padded::<T>(longest) } else { 0 };
    let keys = KeyMemory::new(problem);

    let memory = Memory::new(problem);
    let walks_len = memory.visit_len(problem).max(keys.len(problem, workers));
    let most_stages = KeyMemory::most_stages(problem);
    let per_unit_sums = most_stages * problem.sums_len();
    let shared_len = units * (per_unit_table + per_unit_shifts + per_unit_sums);
    let [query_positions, key_positions] = problem.position_lens();
    let shared_len = shared_len + query_positions + key_positions + 5 * padded::<T>(1);
    let mut arena = Arena::new(scratch.take(problem.table_len() + shared_len + walks_len));
    let table = problem.table(&mut arena);
    let table_gradients = arena.take(units * per_unit_table);
    let shifts = arena.take(units * per_unit_shifts);
    let key_sums = arena.take(units * per_unit_sums);
    key_sums.fill(T::ZERO);
    let (query_positions, key_positions) = (arena.take(query_positions), arena.take(key_positions));
    let scratch = arena.rest();
    let mut positions = problem.position_views(query_positions, key_positions);
    let sink = GradientSink { positions: positions.as_mut().map(|[q, k]| PositionSink::new(q, k)), ..sink };
    let mut sums = ViewMut::strided(&mut *key_sums, [per_unit_sums, problem.sums_len(), 0]);
    let sums = sums.shared();
    let source = Source { cotangent };

    {
        let mut gradients = ViewMut::strided(&mut *table_gradients, [per_unit_table, group * entry, 0]);
        let gradients = gradients.shared();
        let mut shifts = ViewMut::strided(&mut *shifts, [per_unit_shifts, 0, 0]);
        let shifts = shifts.shared();
        visit_rows(
            problem,
            memory,
            table,
            &|unit, segment| {
                // SAFETY: a unit's segment has one visitor at a time; its exponents are written row by row, each row by
                // the segment that it belongs to.
                let (table, shifts) = unsafe {
                    (gradients.row(unit, segment, 0, group * entry), shifts.row(unit, 0, 0, per_unit_shifts))
                };
                table.fill(T::ZERO);
                QueryGradients { source, sink, table, shifts }
            },
            None,
            scratch,
        );
    }
    if let (Some(d_table), Some(table)) = (parameters.first_mut(), &table) {
        reduce_table(problem, table, table_gradients, per_unit_table, &row_segments, d_table);
    }
    let places: Option<Vec<Place<'_, T>>> = d_initial.map(|state| {
        let heads = state.heads_mut().map(|mut head| {
            head.iter_mut().for_each(|part| part.fill(T::ZERO));
            Mutex::new(head.into())
        });
        heads.collect()
    });
    let walk = |index: usize| {
        let unit = problem.unit(index);
        KeyWalk {
            index,
            sums,
            problem,
            unit,
            table,
            source,
            sink,
            shifts: &shifts[index * per_unit_shifts..][..per_unit_shifts],
            rows: true,
            initial: problem.call.initial_state.map(|state| unit.head(state)),
            d_initial: places.as_ref().map(|places| &places[index]),
            d_final: cotangent.final_state.map(|state| unit.head(state)),
        }
    };
    keys.run(problem, &walk, scratch);
    let query_sums = |index: usize, n: usize| {
        let unit = &table_gradients[index * per_unit_table..][..per_unit_table];
        let entries = (0..row_segments(index)).map(move |segment| &unit[(segment * group + n) * entry..][..entry]);
        entries.map(|entry| &entry[entry.len() - problem.sums_len()..]).collect()
    };
    let key_sums = |index: usize| {
        let len = problem.sums_len();
        (0..most_stages).map(|n| &key_sums[index * per_unit_sums + n * len..][..len]).collect()
    };
    problem.write_feature_gradients(&query_sums, &key_sums, [query_positions, key_positions], false, parameters);
}

/// In how many segments a unit's rows are visited.
fn row_segments<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> usize {
    cut_count(problem, unit.sequence.queries - first_row(problem, unit))
}

/// Adds up the table's gradients of all units and segments, in a fixed order, and takes them through the feature map.
pub(super) fn reduce_table<T: Real>(
    problem: &Problem<'_, T>,
    table: &Table<'_, T>,
    gradients: &mut [T],
    per_unit: usize,
    segments: &dyn Fn(usize) -> usize,
    d_table: &mut [T],
) {
    let Some(shaw) = problem.attention.score.shaw() else { return };
    let (head_width, table_dim) = (problem.head_width, problem.table_dim());
    let len = table.width * head_width;
    let entry = len + problem.sums_len();
    let group = problem.dims.group();
    d_table.fill(T::ZERO);
    if shaw.map == RelativeMap::Same
        && let Some(map) = &problem.mapping.rows
    {
        reduce_mapped_table(problem, map, table, gradients, per_unit, segments, d_table);
        return;
    }
    for index in 0..problem.units() {
        let unit = problem.unit(index);
        for segment in 0..segments(index) {
            for (n, head) in problem.heads(&unit).enumerate() {
                let from = &gradients[index * per_unit + (segment * group + n) * entry..][..entry];
                let to = if shaw.shared { 0 } else { head } * shaw.rows() * table_dim;
                for row in 0..table.count {
                    let to = &mut d_table[to + row * table_dim..][..table_dim];
                    problem.ops.add_scaled(to, T::ONE, &from[row * head_width..]);
                }
            }
        }
    }
    if shaw.map == RelativeMap::Identity {
        return;
    }
    // One entry of the gradients' memory is free to bring a table's rows to block form; without units all is 0 anyway.
    let Some(block) = gradients.get_mut(..len) else { return };
    let tables = if shaw.shared { 1 } else { problem.dims.heads };
    for index in 0..tables {
        let raw = Rows { data: &problem.call.parameters[0][index * shaw.rows() * table_dim..], stride: table_dim };
        let d = &mut d_table[index * shaw.rows() * table_dim..][..table.count * table_dim];
        let from = Rows { data: &*d, stride: table_dim };
        problem.ops.load(FeatureMap::Identity, T::ZERO, from, table.count, table_dim, None, block, head_width);
        problem.ops.pull_back(problem.map, raw, table.rows(index), block, table.count, table_dim, head_width);
        for row in 0..table.count {
            problem.ops.store(&block[row * head_width..], T::ONE, &mut d[row * table_dim..][..table_dim]);
        }
    }
}

/// The same through a map of whole rows: a table's gradients are added up as those of features, in the place of the
/// first of them, and a row at a time goes back from there.
fn reduce_mapped_table<T: Real>(
    problem: &Problem<'_, T>,
    map: &RowMap<'_, T>,
    table: &Table<'_, T>,
    gradients: &mut [T],
    per_unit: usize,
    segments: &dyn Fn(usize) -> usize,
    d_table: &mut [T],
) {
    let Some(shaw) = problem.attention.score.shaw() else { return };
    let (head_width, head_dim, group) = (problem.head_width, problem.dims.head_dim, problem.dims.group());
    let len = table.width * head_width;
    let entry = len + problem.sums_len();
    let mut work = vec![T::ZERO; map.work_len(1) + map.raw_width()];
    let (dx, work) = work.split_at_mut(map.raw_width());
    for index in 0..if shaw.shared { 1 } else { problem.dims.heads } {
        let mut first = None;
        for unit in 0..problem.units() {
            for segment in 0..segments(unit) {
                for (n, head) in problem.heads(&problem.unit(unit)).enumerate() {
                    if !shaw.shared && head != index {
                        continue;
                    }
                    let at = unit * per_unit + (segment * group + n) * entry;
                    let Some(first) = first else {
                        first = Some(at);
                        continue;
                    };
                    let (to, from) = gradients.split_at_mut(at);
                    problem.ops.add_scaled(&mut to[first..][..len], T::ONE, &from[..len]);
                }
            }
        }
        let Some(first) = first else { continue };
        for row in 0..table.count {
            let place = (index * shaw.rows() + row) * head_dim;
            let raw = Rows { data: &problem.call.parameters[0][place..], stride: head_dim };
            let d = &mut gradients[first + row * head_width..][..head_width];
            let phi = &table.rows(index)[row * head_width..][..head_width];
            map.pull_back(MapSide::Key(index / group), raw, 1, None, phi, d, head_width, dx, &mut [], work);
            problem.ops.store(dx, T::ONE, &mut d_table[place..][..head_dim]);
        }
    }
}

/// Sizes of the working memory of the walk over the keys.
#[derive(Debug, Clone, Copy)]
struct KeyMemory {
    layout: Layout,
    summary: usize,
    chunk: usize,
    per_worker: usize,
}

impl KeyMemory {
    fn new<T: Real>(problem: &Problem<'_, T>) -> Self {
        let chunk = Sizes::new(problem).chunk;
        let layout = Layout::new(problem);
        let summary = layout.len::<T>();
        Self { layout, summary, chunk, per_worker: KeyBuffers::len(problem, chunk) + 3 * summary }
    }

    /// Most stages that a unit can have: segments of rows and of keys, and two states.
    fn most_stages<T: Real>(problem: &Problem<'_, T>) -> usize {
        let count = |tokens: usize| cut_count(problem, tokens);
        problem.sequences.iter().map(|s| 2 * count(s.queries) + 3 + count(s.keys)).max().unwrap_or(0)
    }

    fn split<T: Real>(problem: &Problem<'_, T>) -> bool {
        problem.units() < rayon::current_num_threads() && Self::most_stages(problem) > 6
    }

    fn len<T: Real>(&self, problem: &Problem<'_, T>, workers: usize) -> usize {
        let shared = if Self::split(problem) { problem.units() * Self::most_stages(problem) * self.summary } else { 0 };
        shared + workers * self.per_worker
    }

    fn run<'w, 'a, T: Real>(
        &self,
        problem: &'w Problem<'a, T>,
        walk: &(impl Fn(usize) -> KeyWalk<'w, 'a, T> + Sync),
        scratch: &mut [T],
    ) {
        let &Self { layout, summary, chunk, per_worker } = self;
        let units = problem.units();
        let start = |unit: &Unit<'_, T>, buffers: &mut KeyBuffers<'_, T>| {
            buffers.lift.start(problem, unit);
            for (n, power) in buffers.powers.iter_mut().rev().enumerate() {
                *power = unit.decay(n);
            }
        };
        if !Self::split(problem) {
            parallel(units, scratch, per_worker, |index, scratch| {
                let mut arena = Arena::new(scratch);
                let mut buffers = KeyBuffers::new(problem, chunk, &mut arena);
                let mut carry = Carry::new(layout, arena.take(summary), arena.take(summary));
                let mut local = Summary::new(layout, arena.take(summary));
                let walk = walk(index);
                start(&walk.unit, &mut buffers);
                let plan = stages(&walk);
                for (n, &stage) in plan.iter().enumerate() {
                    carry.pass(problem, &walk.unit, stage.idle);
                    walk.visit(stage, Some(carry.high.view()), &mut local, &mut buffers);
                    walk.leave(stage, n + 1 == plan.len(), &mut carry, local.view());
                }
                walk.finish(&mut buffers);
            });
            return;
        }
        let most = Self::most_stages(problem);
        let (shared, scratch) = scratch.split_at_mut(units * most * summary);
        let plans: Vec<Vec<Stage>> = (0..units).map(|index| stages(&walk(index))).collect();
        let tasks: Vec<(usize, usize)> =
            plans.iter().enumerate().flat_map(|(unit, plan)| (0..plan.len()).map(move |n| (unit, n))).collect();
        {
            let mut states = ViewMut::strided(&mut *shared, [most * summary, 0, summary]);
            let states = states.shared();
            parallel(tasks.len(), scratch, per_worker, |task, scratch| {
                let mut buffers = KeyBuffers::new(problem, chunk, &mut Arena::new(scratch));
                let (index, n) = tasks[task];
                let walk = walk(index);
                start(&walk.unit, &mut buffers);
                // SAFETY: each (unit, stage) is one task's own.
                let mut local = Summary::new(layout, unsafe { states.row(index, 0, n, summary) });
                walk.visit(plans[index][n], None, &mut local, &mut buffers);
            });
        }
        for (index, states) in shared.chunks_exact_mut(most * summary).enumerate() {
            let mut arena = Arena::new(&mut *scratch);
            let mut carry = Carry::new(layout, arena.take(summary), arena.take(summary));
            let local = arena.take(summary);
            let walk = walk(index);
            for (n, &stage) in plans[index].iter().enumerate() {
                carry.pass(problem, &walk.unit, stage.idle);
                let state = &mut states[n * summary..][..summary];
                local.copy_from_slice(state);
                state.copy_from_slice(carry.high.numbers);
                walk.leave(stage, n + 1 == plans[index].len(), &mut carry, SummaryRef::new(layout, local));
            }
        }
        let shared = &*shared;
        let tasks: Vec<(usize, usize)> = tasks.into_iter().filter(|&(index, n)| plans[index][n].writes()).collect();
        parallel(tasks.len(), scratch, per_worker, |task, scratch| {
            let mut arena = Arena::new(scratch);
            let mut buffers = KeyBuffers::new(problem, chunk, &mut arena);
            let mut local = Summary::new(layout, arena.take(summary));
            let (index, n) = tasks[task];
            let walk = walk(index);
            start(&walk.unit, &mut buffers);
            let state = SummaryRef::new(layout, &shared[(index * most + n) * summary..][..summary]);
            walk.visit(plans[index][n], Some(state), &mut local, &mut buffers);
        });
        parallel(units, scratch, per_worker, |index, scratch| {
            let mut buffers = KeyBuffers::new(problem, chunk, &mut Arena::new(scratch));
            walk(index).finish(&mut buffers);
        });
    }
}

impl Stage {
    /// Whether gradients come of it.
    fn writes(&self) -> bool {
        matches!(self.work, Work::Keys | Work::InitialState)
    }

    /// Tokens that pass with the stage; the order of time has no meaning without a causal mask, nor has decay.
    fn passes<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        if problem.causal { (self.to - self.from) as usize } else { 0 }
    }
}
