//! One chunk of queries against the keys around it: the working memory, and the dense tile of weights that forward and
//! backward share.

use super::decays::Decays;
use super::features::Lift;
use super::problem::{CHUNK, Problem, Table, Unit};
use super::state::Head;
use super::summary::SummaryRef;
use crate::call::Arena;
use crate::feature_map::elementwise::{Shift, copy_rows};
use crate::kernelized::running_sum::{Run, combine};
use crate::simd::Real;
use crate::simd::block::{add_scaled, multiply, scale_by, transpose};
use crate::simd::product::{Band, Product};
use crate::simd::rows::padded;

/// Rows of a chunk and the keys that it touches.
///
/// Query `i` stands at key `t = i + offset`. The *window* holds the values of the keys `window..window_end`: from
/// `t − R` of the first row to the last key that a row of the piece sees through a near weight. The *tile* holds the
/// weights of the keys from `t − R + 1` on (from `t` on for R = 0), so row `i` of it begins its near band at column `i`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    /// First row, counted in its sequence.
    pub row: usize,
    pub rows: usize,
    /// First key of the window; may be negative (earlier calls, or nothing).
    pub window: isize,
    pub window_len: usize,
    /// Keys that rows of the piece see and rows before it do not: `key..key + keys`. Content of earlier ones is in the
    /// state. Empty under a bidirectional mask.
    pub key: usize,
    pub keys: usize,
    /// Rows of the window before the tile's first column: 1, or 0 for R = 0 or without relative positions.
    pub skip: usize,
    /// Columns of the tile before the piece's own keys: R − 1, or 0.
    pub lead: usize,
}

impl Piece {
    /// Keys alone, and as many rows that stand at them.
    pub fn of_keys(key: usize, keys: usize) -> Self {
        Self { row: key, rows: keys, window: key as isize, window_len: keys, key, keys, skip: 0, lead: 0 }
    }

    /// The rows that come after its own, a chunk at most.
    pub fn next_rows(&self) -> (isize, isize) {
        let next = (self.row + self.rows) as isize;
        (next, next + CHUNK as isize)
    }

    pub fn columns(&self) -> usize {
        self.window_len - self.skip
    }

    /// The window's values `v` as they enter the far sum before a row, `R` keys back.
    pub fn entering<'v, T: Real>(
        &self,
        problem: &Problem<'_, T>,
        (v, far): (&'v [T], &'v FarDecays<'_, T>),
    ) -> Run<'v, T> {
        Run {
            rows: v,
            row_length: problem.value_width,
            count: self.rows,
            reverse: false,
            gains: far.gains,
            decays: far.steps,
            weights: &[],
            weight_step: 0,
        }
    }

    /// The same for the far sum after a row, `R` keys ahead, under a bidirectional mask.
    pub fn leaving<'v, T: Real>(
        &self,
        problem: &Problem<'_, T>,
        (v, far): (&'v [T], &'v FarDecays<'_, T>),
    ) -> Run<'v, T> {
        let beyond = 2 * problem.radius.unwrap_or(0) * problem.value_width;
        Run { rows: &v[beyond..], reverse: true, gains: far.steps, ..self.entering(problem, (v, far)) }
    }
}

/// How values enter the far sum of a piece's rows, and how that falls from row to row.
pub(super) struct FarDecays<'s, T> {
    /// What the value `R` keys before a row counts, 0 if it is not there.
    pub gains: &'s mut [T],
    /// From each row to the next.
    pub steps: &'s mut [T],
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub chunk: usize,
    pub window: usize,
    pub tile_row: usize,
}

impl Sizes {
    pub fn new<T: Real>(problem: &Problem<'_, T>) -> Self {
        let longest = problem.sequences.iter().map(|s| s.queries.max(s.keys)).max().unwrap_or(0);
        let chunk = CHUNK.min(padded::<T>(longest.max(1)));
        let radius = problem.radius.unwrap_or(0);
        // A transpose reads whole registers of rows, the content product writes whole registers of columns from `lead`.
        let window = padded::<T>(chunk + if problem.causal { radius } else { 2 * radius } + 1) + padded::<T>(1);
        Self { chunk, window, tile_row: padded::<T>(window + chunk.min(padded::<T>(1))) }
    }
}

/// Working memory of one task: blocks of one chunk.
pub(super) struct Buffers<'s, T> {
    pub sizes: Sizes,
    /// `φ(q)`, chunk × head_width.
    pub q: &'s mut [T],
    /// The exponent subtracted from each row of q.
    pub q_shift: &'s mut [T],
    /// `φ(k)` of the piece's keys, chunk × head_width.
    pub k: &'s mut [T],
    /// Its transpose, head_width × chunk; where scores are formed.
    pub k_columns: &'s mut [T],
    /// Values of the window, window × value_width; rows that are not there are 0.
    pub v: &'s mut [T],
    /// 1 for the window's rows that are there, else 0; under gates what is left of those of an initial state.
    pub present: &'s mut [T],
    /// Whether no key of the window is ignored or missing.
    pub all_present: bool,
    /// Weights, chunk × tile_row.
    pub tile: &'s mut [T],
    /// For gradients, where weights are polynomials of `q·k`: their slopes, chunk × tile_row, and the gradients of the columns of
    /// features that they are made of, chunk × [`linear_width`].
    pub slopes: &'s mut [T],
    pub linear: &'s mut [T],
    /// `φ(q)·ρ(r)`, chunk × table width.
    pub relative: &'s mut [T],
    pub decays: Decays<'s, T>,
    pub far_decays: FarDecays<'s, T>,
    /// The state that the piece starts from: features × value_width, then head_width.
    pub state: &'s mut [T],
    /// Denominators of the chunk's rows.
    pub sums: &'s mut [T],
    /// For gradients: the transposes of the state (value_width × head_width) and of the window's values (value_width ×
    /// window), the state's `z`, the gradient of `φ(q)` (chunk × head_width), and one number a row.
    pub state_columns: &'s mut [T],
    pub v_columns: &'s mut [T],
    pub keys_sum: &'s mut [T],
    pub dq: &'s mut [T],
    pub dots: &'s mut [T],
    /// A far sum that runs along the rows, value_width.
    pub far: &'s mut [T],
    /// Outputs, or the gradients of outputs over their denominators, chunk × value_width.
    pub o: &'s mut [T],
    pub lift: Lift<'s, T>,
}

impl<'s, T: Real> Buffers<'s, T> {
    /// With `gradients`, those of queries are taken back to raw rows.
    pub fn new(problem: &Problem<'_, T>, sizes: Sizes, gradients: bool, arena: &mut Arena<'s, T>) -> Self {
        let Sizes { chunk, window, tile_row } = sizes;
        let of_far = usize::from(problem.radius.is_some()) * chunk;
        Self {
            sizes,
            q: arena.take(chunk * problem.head_width),
            q_shift: arena.take(chunk),
            k: arena.take(chunk * problem.head_width),
            k_columns: arena.take(chunk * problem.head_width),
            v: arena.take(window * problem.value_width),
            present: arena.take(window),
            all_present: true,
            tile: arena.take(chunk * tile_row),
            slopes: arena.take(if gradients { chunk * tile_row } else { 0 } * usize::from(problem.taylor.is_some())),
            linear: arena.take(if gradients { chunk * linear_width(problem) } else { 0 }),
            relative: arena.take(chunk * problem.table_width()),
            decays: Decays::new(problem.attention, chunk, [chunk, window], arena),
            far_decays: FarDecays { gains: arena.take(of_far), steps: arena.take(of_far) },
            state: arena.take(problem.head_width * (problem.value_width + 1)),
            sums: arena.take(chunk),
            state_columns: arena.take(problem.head_width * problem.value_width),
            v_columns: arena.take(window * problem.value_width),
            keys_sum: arena.take(problem.head_width),
            dq: arena.take(chunk * problem.head_width),
            dots: arena.take(chunk),
            far: arena.take(problem.value_width),
            o: arena.take(chunk * problem.value_width),
            lift: Lift::new(problem, chunk, [gradients, false], arena),
        }
    }

    pub fn start(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_, T>) {
        self.lift.start(problem, unit);
        self.decays.start(unit.decay);
    }

    /// Lays out the piece that begins at `row` with at most a chunk of rows, and loads its window and keys.
    ///
    /// It is cut short where one dense tile would not do: at the first row if a value is not finite (0 · NaN would
    /// reach rows that do not see it), and before a key that rises far above the running maximum under an exponential
    /// map. The cut depends on keys and values alone. Returns the piece and the keys' exponent.
    #[allow(clippy::too_many_arguments)]
    pub fn piece(
        &mut self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        offset: isize,
        row: usize,
        end: usize,
        shift: T,
        ring: Option<Head<&[T]>>,
    ) -> (Piece, T) {
        let mut piece = self.lay_out(problem, unit, offset, row, (end - row).min(self.sizes.chunk));
        self.load_window(problem, unit, &piece, ring);
        let mut shift = shift;
        if problem.causal && piece.keys > 0 {
            let mut rows = piece.rows;
            if !unit.is_finite(problem, piece.key, piece.key + piece.keys) {
                rows = 1;
            }
            if problem.content && problem.exponential {
                let keys = self.lay_out(problem, unit, offset, row, rows).keys;
                let (fit, top) = unit.exp_piece(problem, piece.key, piece.key + keys, shift);
                shift = top;
                if fit < keys {
                    rows = fit;
                }
            }
            if rows < piece.rows {
                piece = self.lay_out(problem, unit, offset, row, rows);
                self.load_window(problem, unit, &piece, ring);
            }
        }
        if problem.content {
            self.load_keys(problem, unit, &piece, shift);
        }
        self.load_decays(problem, unit, &piece, row as isize + offset);
        (piece, shift)
    }

    /// Lays out how the weights of a piece fall, whose first row stands at key `first`.
    fn load_decays(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_, T>, piece: &Piece, first: isize) {
        let Piece { rows, lead, .. } = *piece;
        self.decays.load(unit.decay, first, rows, (rows, lead, lead + rows));
        let Some(radius) = problem.radius else { return };
        let FarDecays { gains, steps } = &mut self.far_decays;
        if radius == 0 && !problem.causal {
            // The far sum already holds every key.
            gains[..rows].fill(T::ZERO);
        } else {
            let entering = first - radius as isize;
            self.decays.over(unit.decay, (entering, radius), (0, entering + 1), &mut gains[..rows]);
            multiply(&mut gains[..rows], self.present);
        }
        unit.decay.steps(first, &mut steps[..rows]);
    }

    fn lay_out(&self, problem: &Problem<'_, T>, unit: &Unit<'_, T>, offset: isize, row: usize, rows: usize) -> Piece {
        let stands = row as isize + offset;
        let radius = problem.radius.unwrap_or(0);
        let (key, end) = if problem.causal { (unit.clamp(stands), unit.clamp(stands + rows as isize)) } else { (0, 0) };
        // Without relative positions the window is the piece's own keys.
        let (window, window_len) = match problem.radius {
            None => (key as isize, end - key),
            Some(_) => (stands - radius as isize, rows + if problem.causal { radius } else { 2 * radius }),
        };
        Piece {
            row,
            rows,
            window,
            window_len,
            key,
            keys: end - key,
            skip: radius.min(1),
            lead: radius.saturating_sub(1),
        }
    }

    pub fn load_window(
        &mut self,
        problem: &Problem<'_, T>,
        unit: &Unit<'_, T>,
        piece: &Piece,
        ring: Option<Head<&[T]>>,
    ) {
        let (width, value_dim) = (problem.value_width, problem.dims.value_dim);
        let end = piece.window + piece.window_len as isize;
        let (from, to) = (unit.clamp(piece.window), unit.clamp(end).max(unit.clamp(piece.window)));
        let before = ((from as isize - piece.window).max(0) as usize).min(piece.window_len);
        let there = to - from;
        self.v[..before * width].fill(T::ZERO);
        let padding = unit.sequence.padding(from..to);
        copy_rows(unit.v.skip(from), (there, value_dim), padding, (&mut self.v[before * width..], width));
        // Products and transposes take whole registers of rows.
        let filled = (before + there) * width;
        self.v[filled..padded::<T>(piece.window_len).min(self.sizes.window) * width].fill(T::ZERO);
        if problem.radius.is_none() {
            self.present.fill(T::ONE);
            return;
        }
        self.present.fill(T::ZERO);
        self.present[before..before + there].fill(T::ONE);
        if let Some(padding) = padding {
            for (present, &ignored) in self.present[before..].iter_mut().zip(padding) {
                if ignored {
                    *present = T::ZERO;
                }
            }
        }
        if let Some(state) = ring {
            for index in 0..before {
                let back = -(piece.window + index as isize);
                if let Some(row) = usize::try_from(back).ok().and_then(|back| state.ring_row(back, value_dim + 1)) {
                    self.v[index * width..][..value_dim].copy_from_slice(&row[..value_dim]);
                    self.present[index] = row[value_dim];
                }
            }
        }
        self.all_present = self.present[..piece.window_len].iter().all(|&x| x == T::ONE);
    }

    pub fn load_keys(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_, T>, piece: &Piece, shift: T) {
        let width = problem.head_width;
        problem.load_keys(unit, piece.key, piece.keys, Shift::One(shift), self.k, &mut self.lift);
        let rows = padded::<T>(piece.keys);
        self.k[piece.keys * width..rows * width].fill(T::ZERO);
    }

    /// Transposes what scores are formed of in the piece's keys.
    pub fn transpose_keys(&mut self, problem: &Problem<'_, T>, piece: &Piece) {
        let (width, rows) = (problem.head_width, padded::<T>(piece.keys));
        let columns = if problem.taylor.is_some() { linear_width(problem) } else { width };
        transpose((self.k, width), (rows, columns), (self.k_columns, self.sizes.chunk));
    }

    /// `φ(q)·ρ(r)` for every row of the piece, times `scale`.
    pub fn load_relative(
        &mut self,
        problem: &Problem<'_, T>,
        table: &Table<'_, T>,
        head: usize,
        rows: usize,
        scale: T,
    ) {
        Product::of(
            (self.q, problem.head_width),
            (table.columns(head), table.width),
            (self.relative, table.width),
            [rows, table.width, problem.depth],
        )
        .compute();
        if scale != T::ONE {
            scale_by(&mut self.relative[..rows * table.width], scale);
        }
    }

    /// Fills the tile with the weights of a piece: content of its own keys times `content_scale`, near relative
    /// weights, decay; 0 elsewhere. Returns whether there is any.
    pub fn fill_tile(
        &mut self,
        problem: &Problem<'_, T>,
        piece: &Piece,
        table: Option<&Table<'_, T>>,
        content_scale: T,
        decays: bool,
    ) -> bool {
        let row_length = self.sizes.tile_row;
        let near = near_columns(problem);
        let content = problem.content && piece.keys > 0;
        if !content && near == 0 {
            return false;
        }
        if near > 0 || problem.radius.is_some() {
            self.tile[..piece.rows * row_length].fill(T::ZERO);
        }
        if content {
            self.weigh_pairs(problem, piece);
            if content_scale != T::ONE {
                scale_by(&mut self.tile[..piece.rows * row_length], content_scale);
            }
            if problem.radius.is_some() {
                for row in 0..piece.rows {
                    self.tile[row * row_length + piece.lead + row + 1..(row + 1) * row_length].fill(T::ZERO);
                }
            }
        }
        if let Some(table) = table
            && near > 0
        {
            for row in 0..piece.rows {
                let weights = &self.relative[row * table.width + 1..][..near];
                add_scaled(&mut self.tile[row * row_length + row..][..near], T::ONE, weights);
            }
            if !self.all_present {
                for row in 0..piece.rows {
                    let line = &mut self.tile[row * row_length..][..piece.columns()];
                    multiply(line, &self.present[piece.skip..]);
                }
            }
        }
        if decays {
            self.decay_tile(piece);
        }
        true
    }

    /// Writes the weights of the piece's rows and its own keys into the tile, and their slopes where there is room for them.
    pub fn weigh_pairs(&mut self, problem: &Problem<'_, T>, piece: &Piece) {
        let weights = (&mut self.tile[piece.lead..], self.sizes.tile_row);
        let keys = (&*self.k_columns, self.sizes.chunk);
        problem.weigh_pairs(self.q, keys, weights, [piece.rows, piece.keys], self.slopes);
    }

    /// Fills the tile with the parts of denominators that a piece's own keys have, where those are not its weights.
    pub fn fill_denominators(&mut self, problem: &Problem<'_, T>, piece: &Piece, from: usize, scale: T, decays: bool) {
        let chunk = self.sizes.chunk;
        Product::of(
            (&self.q[from..], problem.head_width),
            (&self.k_columns[from * chunk..], chunk),
            (self.tile, self.sizes.tile_row),
            [piece.rows, piece.keys, problem.layout.mapped],
        )
        .c_band(Band::up_to(0))
        .compute();
        if scale != T::ONE {
            scale_by(&mut self.tile[..piece.rows * self.sizes.tile_row], scale);
        }
        if decays {
            self.decay_tile(piece);
        }
    }

    /// Multiplies each weight of the tile by what it has fallen to.
    pub fn decay_tile(&mut self, piece: &Piece) {
        self.decays.apply((self.tile, self.sizes.tile_row), piece.rows, piece.lead + piece.rows);
    }

    /// The column range of the tile that can be other than 0, as a band.
    pub fn tile_band(problem: &Problem<'_, T>, piece: &Piece) -> Band {
        match problem.radius {
            None => Band::up_to(0),
            Some(_) if !problem.causal => Band { from: 0, to: near_columns(problem) as isize },
            // Near keys reach back to the column of the row's own number, and content no further than they.
            Some(radius) if !problem.content || piece.rows <= radius => Band { from: 0, to: radius as isize },
            Some(_) => Band::up_to(piece.lead as isize),
        }
    }
}

/// The state that a piece starts from, `start · start_scale + local · local_scale` as `(S, z)`: borrowed where one of
/// them is empty, formed in `buffer` otherwise, `None` where both are.
pub(super) fn combine_states<'b, T: Real>(
    buffer: &'b mut [T],
    (start, start_scale): (SummaryRef<'b, T>, T),
    local: Option<(SummaryRef<'b, T>, T)>,
) -> Option<(&'b [T], &'b [T])> {
    let local = local.filter(|(local, _)| local.has_content());
    match (start.has_content(), local) {
        (false, None) => None,
        (true, None) if start_scale == T::ONE => Some((start.sum(), start.keys())),
        (false, Some((local, scale))) if scale == T::ONE => Some((local.sum(), local.keys())),
        (_, local) => {
            // A start without content is all zeros, so either may stand for the other.
            let (local, local_scale) = local.unwrap_or((start, T::ZERO));
            let (sum, keys) = buffer.split_at_mut(start.sum().len());
            let keys = &mut keys[..start.keys().len()];
            combine(sum, start_scale, start.sum(), local_scale, local.sum());
            combine(keys, start_scale, start.keys(), local_scale, local.keys());
            Some((sum, keys))
        }
    }
}

/// Numbers of a row's first features, which weights that are polynomials of `q·k` are made of; 0 for others.
pub(super) fn linear_width<T: Real>(problem: &Problem<'_, T>) -> usize {
    problem.taylor.map_or(0, |taylor| padded::<T>(taylor.first + problem.dims.head_dim))
}

/// Near columns of one row: distances from −R+1 to 0, or to R−1 under a bidirectional mask.
pub(super) fn near_columns<T: Real>(problem: &Problem<'_, T>) -> usize {
    match problem.radius {
        None | Some(0) => 0,
        Some(radius) if problem.causal => radius,
        Some(radius) => 2 * radius - 1,
    }
}
