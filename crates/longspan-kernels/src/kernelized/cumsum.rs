//! The published algorithm (Choromanski et al. 2021 in its masked form): outer products of keys and values, cumulated
//! over the keys and all of them kept, then one of the sums for each row.
//!
//! With `v⁺ = [v, 1]` and `P_n = Σ_{j<n} φ(k_j) v⁺_jᵀ`, row `i` at key `t = i + o` gives `[N_i, D_i] = P_{c(t+1)}ᵀ φ(q_i)`,
//! `c(x) = clip(x, 0, Lk)`: that is the published *align*, which repeats the last sum or cuts the list to the number of
//! queries, for every offset. Relative positions add
//! `w_0 Σ_{j<m} v⁺_j + Σ_{m≤j<e} w_{j−t+R} v⁺_j + w_{2R} Σ_{j≥e} v⁺_j` with `w = φ(q_i) ρ(r)ᵀ`, from cumulated sums of `v⁺`
//! from both ends and the near keys `m..e`, `m = c(t−R+1)`, `e = c(t+R)` (`c(t+1)` and no last term under a causal mask).
//! What is printed as that algorithm lets each row see one key of its future, pads too little and counts the last term
//! from the wrong end; this is the sum that it means.
//!
//! The gradient cumulates from the other end, in the same memory: each row adds `φ(q_i) dN⁺_iᵀ` to the place that it
//! read, a reverse running sum makes `R_j = Σ_{i: j ≤ t} φ(q_i) dN⁺_iᵀ` of them, and so for the sums of `v⁺`.
//!
//! The memory is the algorithm's nature: keys · d · (dv + 1) numbers for each head under a causal mask, which is why
//! [`check`] bounds it, and why the chunked algorithm exists. Sums run over the keys in order, each in one piece: their
//! rounding errors grow with the root of the length.

use super::backward::{GradientSink, reduce_table};
use super::features::Lift;
use super::forward::Sink;
use super::naive::{most_keys, write_row};
use super::problem::{Problem, Table, Unit};
use crate::algorithm::Algorithm;
use crate::error::Error;
use crate::feature_map::FeatureMap;
use crate::feature_map::elementwise::LoadFeatures;
use crate::feature_map::rows::Shift;
use crate::mechanism::{Cotangent, Mechanism};
use crate::scratch::{Arena, Scratch};
use crate::shape::ViewMut;
use crate::simd::block::{add_row_dots, add_scaled, dot, multiply, scale_by, store};
use crate::simd::product::{Band, Product};
use crate::simd::rows::padded;
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

/// Working memory of one call at most, all heads that run at once together: a machine that runs this at all has it, and
/// beyond 65,000 keys of 64 features no one gains from this algorithm.
const LIMIT_BYTES: usize = 2 << 30;

/// Keys whose features are formed at a time.
const ROWS: usize = 64;

/// Sizes of one worker's memory.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    keys: usize,
    /// Sums that are kept: one a key, or the total alone under a bidirectional mask.
    sums: usize,
    /// Numbers of one of them.
    sum: usize,
    /// `v⁺` in whole cache lines.
    width: usize,
    /// `v⁺`s that are kept for relative positions: from the front, from the back, and gradients of near ones.
    scans: usize,
    head_width: usize,
    table_width: usize,
}

impl Sizes {
    fn new<T: Real>(problem: &Problem<'_, T>) -> Self {
        let keys = most_keys(problem);
        let width = width(problem);
        Self {
            keys,
            sums: if !problem.content { 0 } else { keys.min(if problem.causal { usize::MAX } else { 1 }) },
            sum: problem.layout.mapped.saturating_mul(width),
            width,
            scans: if problem.radius.is_some() { 3 } else { 0 },
            head_width: problem.head_width,
            table_width: problem.table_width(),
        }
    }

    /// Numbers of one worker's memory beside what its map works with; the largest number there is if they are more than that.
    fn len<T>(self) -> usize {
        let line = padded::<T>(1);
        let a_key = self.head_width.saturating_add(self.width.saturating_mul(1 + self.scans)).saturating_add(1);
        let rows = 2 * self.head_width + 2 * self.width + 3 * self.table_width;
        let sums = self.sums.saturating_mul(self.sum).saturating_add(self.keys.saturating_mul(a_key));
        // Exponents end somewhere in a cache line, all else with one.
        sums.saturating_add(rows + 2 * line) / line * line
    }
}

/// `v⁺` in whole cache lines.
fn width<T: Real>(problem: &Problem<'_, T>) -> usize {
    padded::<T>(problem.dims.value_dim + 1)
}

/// Whether the cumulated sums of one head fit, so that a length that this algorithm is not for is an error and no abort.
pub(super) fn check<T: Real>(problem: &Problem<'_, T>, operation: &'static str) -> Result<(), Error> {
    let sizes = Sizes::new(problem);
    let bytes = sizes.len::<T>().saturating_mul(size_of::<T>());
    if bytes <= LIMIT_BYTES { Ok(()) } else { Err(too_large::<T>(operation, sizes)) }
}

fn too_large<T>(operation: &'static str, sizes: Sizes) -> Error {
    let bytes = sizes.len::<T>().saturating_mul(size_of::<T>());
    Error::Argument {
        operation,
        argument: "algorithm",
        expected: format!(
            "one whose working memory fits, at most {} MiB, such as {}",
            LIMIT_BYTES >> 20,
            Algorithm::Chunked
        ),
        got: format!("{} with {} MiB for a head of {} keys", Algorithm::Cumsum, bytes >> 20, sizes.keys),
    }
}

/// Working memory of a call, `shared` numbers beside those of the workers; an error if the machine has not that much.
fn reserve<'s, T: Real>(
    problem: &Problem<'_, T>,
    shared: usize,
    per_worker: usize,
    scratch: &'s mut Scratch<T>,
) -> Result<Arena<'s, T>, Error> {
    let len = shared + workers(problem, per_worker) * per_worker;
    let operation = problem.attention.name();
    scratch.reserve(len).ok_or_else(|| too_large::<T>(operation, Sizes::new(problem)))?;
    Ok(Arena::new(scratch.take(len)))
}

/// Workers that run at once: as many as there are threads and as the memory has room for.
fn workers<T: Real>(problem: &Problem<'_, T>, per_worker: usize) -> usize {
    let room = LIMIT_BYTES / size_of::<T>() / per_worker;
    threads::count().min(problem.units()).min(room).max(1)
}

/// The cumulated sums of one unit.
struct Sums<'x, 'a, T: 'static> {
    problem: &'x Problem<'a, T>,
    unit: Unit<'a, T>,
    table: Option<Table<'x, T>>,
    sizes: Sizes,
    /// `φ(k)`, keys × head_width, relative to the exponent of the first sum that holds the key.
    k: &'x mut [T],
    /// `v⁺`, keys × width; 0 where a key is ignored.
    v: &'x mut [T],
    /// `P_1, P_2, …`, each features × width; `P_Lk` alone under a bidirectional mask.
    outer: &'x mut [T],
    /// The exponent subtracted from all keys of each of them, −∞ for none; under an exponential map only.
    shifts: &'x mut [T],
    /// Sums of `v⁺` over the keys up to this one, and from this one on; with relative positions only.
    before: &'x mut [T],
    after: &'x mut [T],
    /// `γ^{R−r}` for the table's near rows, 1 for its row 0.
    powers: &'x mut [T],
    /// The first key that is not ignored.
    first: usize,
}

/// What one row sees.
#[derive(Clone, Copy)]
struct Sight<T> {
    /// Keys before this one, but for those ignored.
    end: usize,
    /// Its place among the sums.
    place: usize,
    /// What brings that sum to the row: decay, and the common exponent.
    content: T,
    /// What brings the table's terms to that exponent.
    position: T,
    /// The exponent that all weights are relative to, the query's own aside.
    shift: T,
    /// The near keys `from..to`; those before share the table's first row, those behind its last.
    near: (usize, usize),
    /// The table's row of key `near.0`.
    near_row: usize,
    /// Decay since the last key before the near ones.
    far_decay: T,
}

impl<T: Real> Sight<T> {
    /// Near keys.
    fn near_len(&self) -> usize {
        self.near.1 - self.near.0
    }
}

/// `C += A·B`, where A is one row, or one column if `depth` is 1; B and C come with the lengths of their rows.
fn thin<T: Real>(
    [rows, depth, columns]: [usize; 3],
    a: &[T],
    (b, b_row): (&[T], usize),
    (c, c_row): (&mut [T], usize),
) {
    dispatch(Product {
        a,
        a_row: 1,
        a_column: 1,
        b,
        b_row,
        c,
        c_row,
        rows,
        columns,
        depth,
        accumulate: true,
        a_band: Band::ALL,
        c_band: Band::ALL,
    });
}

impl<'x, 'a, T: Real> Sums<'x, 'a, T> {
    fn new(
        problem: &'x Problem<'a, T>,
        index: usize,
        table: Option<Table<'x, T>>,
        lift: &mut Lift<'_, T>,
        arena: &mut Arena<'x, T>,
    ) -> Self {
        let unit = problem.unit(index);
        let keys = unit.sequence.keys;
        let all = Sizes::new(problem);
        let sums = all.sums.min(keys);
        let sizes = Sizes { keys, sums, ..all };
        let (exp, scans) = (problem.content && problem.exponential, usize::from(table.is_some()));
        let mut sums = Self {
            problem,
            unit,
            table,
            k: arena.take(if problem.content { keys * sizes.head_width } else { 0 }),
            v: arena.take(keys * sizes.width),
            outer: arena.take(sizes.sums * sizes.sum),
            shifts: arena.take(if exp { sizes.sums } else { 0 }),
            before: arena.take(scans * keys * sizes.width),
            after: arena.take(scans * keys * sizes.width),
            powers: arena.take(sizes.table_width),
            first: (0..keys).find(|&key| !unit.ignores(key)).unwrap_or(keys),
            sizes,
        };
        sums.load(lift);
        sums.cumulate_keys();
        if let Some(radius) = problem.radius.filter(|_| table.is_some()) {
            for (row, power) in sums.powers.iter_mut().enumerate() {
                *power = if row == 0 { T::ONE } else { unit.decay(radius.saturating_sub(row)) };
            }
            sums.before.copy_from_slice(sums.v);
            sums.after.copy_from_slice(sums.v);
            cumulate(sums.before, sizes.width, unit.decay(1), false);
            cumulate(sums.after, sizes.width, unit.decay(1), true);
        }
        sums
    }

    /// The sum that key `key` is the first to enter.
    fn place(&self, key: usize) -> usize {
        if self.problem.causal { key } else { 0 }
    }

    fn load(&mut self, lift: &mut Lift<'_, T>) {
        let Self { problem, unit, sizes, .. } = *self;
        let (keys, value_dim) = (unit.sequence.keys, problem.dims.value_dim);
        let padding = unit.sequence.padding;
        dispatch(LoadFeatures {
            map: FeatureMap::Identity,
            shift: T::ZERO,
            from: unit.v,
            count: keys,
            width: value_dim,
            ignored: padding,
            to: self.v,
            to_row: sizes.width,
        });
        for key in (0..keys).filter(|&key| !unit.ignores(key)) {
            self.v[key * sizes.width + value_dim] = T::ONE;
        }
        if !problem.content {
            return;
        }
        if problem.exponential && problem.causal {
            let mut highest = T::NEG_INFINITY;
            for key in 0..keys {
                highest = unit.highest(problem, key, key + 1, highest);
                self.shifts[key] = highest;
            }
        } else if let Some(shift) = self.shifts.first_mut() {
            *shift = unit.highest(problem, 0, keys, T::NEG_INFINITY);
        }
        let mut shifts = [T::ZERO; ROWS];
        for first in (0..keys).step_by(ROWS) {
            let count = ROWS.min(keys - first);
            for key in first..first + count {
                shifts[key - first] = self.shifts.get(self.place(key)).map_or(T::ZERO, |&shift| finite_or_zero(shift));
            }
            let shift = if problem.exponential { Shift::Each(&shifts) } else { Shift::One(T::ZERO) };
            problem.load_keys(&unit, first, count, shift, &mut self.k[first * sizes.head_width..], lift);
        }
    }

    /// What a sum is multiplied by when the one at `place` takes it in.
    fn passing(&self, place: usize) -> T {
        let gamma = self.unit.decay(1);
        match self.shifts.get(place.wrapping_sub(1)..=place) {
            Some(&[before, now]) if before != now => gamma * (before - now).exp(),
            _ => gamma,
        }
    }

    fn cumulate_keys(&mut self) {
        let Sizes { sum, width, head_width, .. } = self.sizes;
        let keys = if self.problem.content { self.sizes.keys } else { 0 };
        for key in 0..keys {
            let place = self.place(key);
            if key == 0 {
                self.outer[..sum].fill(T::ZERO);
            } else if place > 0 {
                let passing = self.passing(place);
                self.outer.copy_within((place - 1) * sum..place * sum, place * sum);
                if passing != T::ONE {
                    scale_by(&mut self.outer[place * sum..][..sum], passing);
                }
            }
            let (k, v) = (&self.k[key * head_width..], &self.v[key * width..]);
            let to = (&mut self.outer[place * sum..][..sum], width);
            thin([self.problem.layout.mapped, 1, width], k, (v, width), to);
        }
    }

    /// What row `row` sees, or none if it sees nothing.
    fn sight(&self, row: usize) -> Option<Sight<T>> {
        let (problem, keys) = (self.problem, self.sizes.keys);
        let stands = row as isize + problem.offset;
        let end = if problem.causal { self.unit.clamp(stands + 1) } else { keys };
        if self.first >= end {
            return None;
        }
        let place = self.place(end - 1);
        // Decay comes with a causal mask alone, so the row stands at the keys that are counted here or later.
        let since = |keys: usize| {
            if self.unit.gamma == 1.0 { T::ONE } else { self.unit.decay((stands + 1 - keys as isize) as usize) }
        };
        let (mut near, mut near_row, mut far_decay) = ((end, end), 0, T::ONE);
        if let Some(radius) = problem.radius {
            let reach = radius as isize;
            near = match (radius, problem.causal) {
                // One weight for all keys.
                (0, false) => (keys, keys),
                (_, true) => (self.unit.clamp(stands - reach + 1), end),
                (_, false) => (self.unit.clamp(stands - reach + 1), self.unit.clamp(stands + reach)),
            };
            if near.0 < near.1 {
                near_row = (near.0 as isize - stands + reach) as usize;
            }
            if near.0 > 0 {
                far_decay = since(near.0);
            }
        }
        let (mut content, mut position, mut shift) = (since(end), T::ONE, T::ZERO);
        if problem.exponential {
            let of_keys = self.shifts.get(place).copied().unwrap_or(T::NEG_INFINITY);
            shift = finite_or_zero(self.table.map_or(of_keys, |table| of_keys.max(table.shift)));
            if of_keys.is_finite() {
                content *= (of_keys - shift).exp();
            }
            position = self.table.map_or(T::ONE, |table| (table.shift - shift).exp());
        }
        Some(Sight { end, place, content, position, shift, near, near_row, far_decay })
    }

    /// Fills `w` with the weights of the table's rows for one row of queries.
    fn weigh(&self, sight: &Sight<T>, head: usize, q: &[T], w: &mut [T]) {
        let Some(table) = &self.table else { return };
        w.fill(T::ZERO);
        thin([1, self.problem.layout.mapped, table.width], q, (table.columns(head), table.width), (w, table.width));
        self.bring(sight, w);
    }

    /// Multiplies what belongs to the table's rows by what their terms are multiplied by.
    fn bring(&self, sight: &Sight<T>, w: &mut [T]) {
        if sight.position != T::ONE {
            scale_by(w, sight.position);
        }
        if self.unit.gamma != 1.0 {
            multiply(w, self.powers);
            w[0] *= sight.far_decay;
        }
    }

    /// The sum of `v⁺` that the table's first row weighs, and that which its last one does, with these rows' numbers and
    /// the keys at which they are kept.
    fn far(&self, sight: &Sight<T>) -> [Option<(usize, usize, bool)>; 2] {
        let (from, to) = sight.near;
        let last = 2 * self.problem.radius.unwrap_or(0);
        let keys = self.sizes.keys;
        [(from > 0).then(|| (0, from - 1, false)), (to < keys && !self.problem.causal).then_some((last, to, true))]
    }

    /// `[N, D]` of one row.
    fn read(&self, sight: &Sight<T>, q: &[T], w: &[T], sum: &mut [T]) {
        let Sizes { sum: len, width, .. } = self.sizes;
        sum.fill(T::ZERO);
        if self.problem.content {
            let outer = (&self.outer[sight.place * len..][..len], width);
            thin([1, self.problem.layout.mapped, width], q, outer, (sum, width));
            if sight.content != T::ONE {
                scale_by(sum, sight.content);
            }
        }
        if self.table.is_some() {
            for (row, key, behind) in self.far(sight).into_iter().flatten() {
                let of = if behind { &self.after } else { &self.before };
                add_scaled(sum, w[row], &of[key * width..][..width]);
            }
            if sight.near_len() > 0 {
                let values = (&self.v[sight.near.0 * width..], width);
                thin([1, sight.near_len(), width], &w[sight.near_row..], values, (sum, width));
            }
        }
    }

    /// The gradient of `φ(q)` of one row from `d`, that of `[N, D]`, and the table's into `d_table`, both to be
    /// multiplied by `gain`.
    fn read_gradient(
        &self,
        (sight, head): (&Sight<T>, usize),
        (q, d): (&[T], &[T]),
        dw: &mut [T],
        dq: &mut [T],
        (d_table, gain): (&mut [T], T),
    ) {
        let Sizes { sum: len, width, head_width, .. } = self.sizes;
        dq.fill(T::ZERO);
        if self.problem.content {
            let features = self.problem.layout.mapped;
            add_row_dots(&self.outer[sight.place * len..][..len], width, d, &mut dq[..features]);
            if sight.content != T::ONE {
                scale_by(dq, sight.content);
            }
        }
        let Some(table) = &self.table else { return };
        dw.fill(T::ZERO);
        for (row, key, behind) in self.far(sight).into_iter().flatten() {
            let of = if behind { &self.after } else { &self.before };
            dw[row] = dot(d, &of[key * width..][..width]);
        }
        let (near, near_row) = (sight.near_len(), sight.near_row);
        add_row_dots(&self.v[sight.near.0 * width..], width, d, &mut dw[near_row..][..near]);
        self.bring(sight, dw);
        // Only rows of the table that belong to a key: a number elsewhere that is not finite is none of this row's.
        let rows = table.rows(head);
        for (row, ..) in self.far(sight).into_iter().flatten() {
            add_scaled(dq, dw[row], &rows[row * head_width..][..head_width]);
            add_scaled(&mut d_table[row * head_width..][..head_width], gain * dw[row], q);
        }
        if near > 0 {
            let near_rows = (&rows[near_row * head_width..], head_width);
            thin([1, near, head_width], &dw[near_row..], near_rows, (dq, head_width));
            let dw = &mut dw[near_row..][..near];
            scale_by(dw, gain);
            thin([near, 1, head_width], dw, (q, head_width), (&mut d_table[near_row * head_width..], head_width));
        }
    }

    /// Forgets all sums, to take in gradients instead.
    fn clear(&mut self) {
        self.outer.fill(T::ZERO);
        self.before.fill(T::ZERO);
        self.after.fill(T::ZERO);
    }

    /// Adds a row's part to the gradients of what it read; `q` is multiplied by the row's gain, and so is `w`. `near`
    /// takes the gradients of near values.
    fn write(&mut self, sight: &Sight<T>, (q, d): (&mut [T], &[T]), w: &[T], near: &mut [T]) {
        let Sizes { sum: len, width, .. } = self.sizes;
        if self.table.is_some() {
            for (row, key, behind) in self.far(sight).into_iter().flatten() {
                let to = if behind { &mut self.after } else { &mut self.before };
                add_scaled(&mut to[key * width..][..width], w[row], d);
            }
            if sight.near_len() > 0 {
                let to = (&mut near[sight.near.0 * width..], width);
                thin([sight.near_len(), 1, width], &w[sight.near_row..], (d, width), to);
            }
        }
        if self.problem.content {
            scale_by(q, sight.content);
            let to = (&mut self.outer[sight.place * len..][..len], width);
            thin([self.problem.layout.mapped, 1, width], q, (d, width), to);
        }
    }

    /// Cumulates what [`write`](Self::write) has gathered, each from the end where its rows stand.
    fn cumulate_gradients(&mut self) {
        let Sizes { sum, sums, width, .. } = self.sizes;
        for place in (1..sums).rev() {
            let passing = self.passing(place);
            let (to, from) = self.outer[(place - 1) * sum..].split_at_mut(sum);
            add_scaled(to, passing, &from[..sum]);
        }
        let gamma = self.unit.decay(1);
        cumulate(self.before, width, gamma, true);
        cumulate(self.after, width, gamma, false);
    }
}

fn finite_or_zero<T: Real>(x: T) -> T {
    if x.is_finite() { x } else { T::ZERO }
}

/// `rows[n] ← rows[n] + γ·rows[n − 1]` from the first row to the last, or from the last to the first.
fn cumulate<T: Real>(rows: &mut [T], width: usize, gamma: T, reverse: bool) {
    let count = rows.len() / width;
    for n in 1..count {
        let at = if reverse { count - 1 - n } else { n - 1 } * width;
        let (low, high) = rows[at..at + 2 * width].split_at_mut(width);
        let (from, to) = if reverse { (high, low) } else { (low, high) };
        add_scaled(to, gamma, from);
    }
}

/// Computes every output of a call that [`check`] let pass.
pub(super) fn forward<T: Real>(
    problem: &Problem<'_, T>,
    sink: Sink<'_, T>,
    scratch: &mut Scratch<T>,
) -> Result<(), Error> {
    let per_worker = Sizes::new(problem).len::<T>() + Lift::len(problem, ROWS);
    let mut arena = reserve(problem, problem.table_len(), per_worker, scratch)?;
    let table = problem.table(&mut arena);
    parallel(problem.units(), arena.rest(), per_worker, |index, scratch| {
        let mut arena = Arena::new(scratch);
        let mut lift = Lift::new(problem, ROWS, [false; 2], &mut arena);
        let sums = Sums::new(problem, index, table, &mut lift, &mut arena);
        let (q, w) = (arena.take(sums.sizes.head_width), arena.take(sums.sizes.table_width));
        let sum = arena.take(sums.sizes.width);
        for head in problem.heads(&sums.unit) {
            for row in 0..sums.unit.sequence.queries {
                let mut denominator = T::ZERO;
                let mut exponent = T::ZERO;
                sum.fill(T::ZERO);
                if let Some(sight) = sums.sight(row) {
                    let mut q_shift = [T::ZERO];
                    problem.load_queries(&sums.unit, head, row, 1, &mut q_shift, q, &mut lift);
                    exponent = sight.shift + q_shift[0];
                    sums.weigh(&sight, head, q, w);
                    sums.read(&sight, q, w, sum);
                    denominator = sum[problem.dims.value_dim];
                }
                write_row(problem, &sums.unit, &sink, (head, row), (sum, denominator, exponent));
            }
        }
    });
    Ok(())
}

/// One row's part in the gradient.
struct RowGradient<T> {
    sight: Sight<T>,
    /// What the gradient of the numerator was not divided by yet: 1 / D.
    gain: T,
}

/// Computes every gradient of a call that [`check`] let pass. The inverse of the denominator multiplies features rather
/// than `G`, which keeps a small one from overflowing on its own.
pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: GradientSink<'_, T>,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) -> Result<(), Error> {
    let (head_dim, value_dim) = (problem.dims.head_dim, problem.dims.value_dim);
    let features = problem.layout.mapped;
    let head_width = problem.head_width;
    let sums_len = problem.sums_len();
    let entry = problem.table_width() * head_width + sums_len;
    let per_unit = problem.dims.group() * entry;
    let per_worker = Sizes::new(problem).len::<T>() + Lift::len(problem, ROWS);
    let shared = problem.table_len() + problem.units() * (per_unit + sums_len) + padded::<T>(1);
    let mut arena = reserve(problem, shared, per_worker, scratch)?;
    let table = problem.table(&mut arena);
    let table_gradients = arena.take(problem.units() * per_unit);
    let key_sums = arena.take(problem.units() * sums_len);
    {
        let mut key_sums = ViewMut::strided(&mut *key_sums, [sums_len, 0, 0]);
        let key_sums = key_sums.shared();
        let mut gradients = ViewMut::strided(&mut *table_gradients, [per_unit, 0, 0]);
        let gradients = gradients.shared();
        parallel(problem.units(), arena.rest(), per_worker, |index, scratch| {
            let mut arena = Arena::new(scratch);
            let mut lift = Lift::new(problem, ROWS, [true; 2], &mut arena);
            let mut sums = Sums::new(problem, index, table, &mut lift, &mut arena);
            let Sizes { keys, sum: len, width, table_width, .. } = sums.sizes;
            let (unit, sequence) = (sums.unit, sums.unit.sequence);
            let near = arena.take(if table.is_some() { keys * width } else { 0 });
            near.fill(T::ZERO);
            let (q, dq) = (arena.take(head_width), arena.take(head_width));
            let (d, dv) = (arena.take(width), arena.take(width));
            let (w, dw) = (arena.take(table_width), arena.take(table_width));
            // SAFETY: each unit is one task's own.
            let (d_table, key_sums) =
                unsafe { (gradients.row(index, 0, 0, per_unit), key_sums.row(index, 0, 0, sums_len)) };
            d_table.fill(T::ZERO);
            key_sums.fill(T::ZERO);

            // φ(q) and the gradient of `[N, D]` of a row; none where the row gives 0 whatever the inputs are.
            let load = |sums: &Sums<'_, '_, T>,
                        (head, row): (usize, usize),
                        q: &mut [T],
                        d: &mut [T],
                        lift: &mut Lift<'_, T>| {
                let sight = sums.sight(row)?;
                let mut q_shift = [T::ZERO];
                problem.load_queries(&unit, head, row, 1, &mut q_shift, q, lift);
                let [q_shift] = q_shift;
                let d_out = cotangent.d_out.rows(sequence.batch, head).skip(sequence.query_start + row);
                dispatch(LoadFeatures {
                    map: FeatureMap::Identity,
                    shift: T::ZERO,
                    from: d_out,
                    count: 1,
                    width: value_dim,
                    ignored: None,
                    to: d,
                    to_row: width,
                });
                if !problem.attention.normalize {
                    if problem.exponential {
                        scale_by(d, (sight.shift + q_shift).exp());
                    }
                    return Some(RowGradient { sight, gain: T::ONE });
                }
                let place = (sequence.batch * problem.dims.heads + head) * problem.dims.queries;
                let denominator = cotangent.denominators[place + sequence.query_start + row];
                let out = cotangent.out.rows(sequence.batch, head);
                d[value_dim] = -dot(out.row(sequence.query_start + row, value_dim), d);
                (!denominator.vanishes()).then(|| RowGradient { sight, gain: T::ONE / denominator })
            };

            let every_row = || problem.heads(&unit).flat_map(|head| (0..sequence.queries).map(move |row| (head, row)));
            for (head, row) in every_row() {
                let token = sequence.query_start + row;
                // SAFETY: each (batch, head, token) belongs to one unit, so to one task.
                let to = unsafe { sink.dq.row(sequence.batch, head, token, head_dim) };
                let Some(RowGradient { sight, gain }) = load(&sums, (head, row), q, d, &mut lift) else {
                    to.fill(T::ZERO);
                    continue;
                };
                let d_table = &mut d_table[head % problem.dims.group() * entry..][..entry];
                let (d_table, query_sums) = d_table.split_at_mut(entry - sums_len);
                sums.read_gradient((&sight, head), (q, d), dw, dq, (d_table, gain));
                scale_by(dq, gain);
                let (raw, _) = problem.pull_back_queries(&unit, head, row, 1, q, dq, query_sums, None, &mut lift);
                store(raw, T::ONE, to);
            }

            sums.clear();
            // Keys from here on are seen by no row.
            let mut end = 0;
            for (head, row) in every_row() {
                if let Some(RowGradient { sight, gain }) = load(&sums, (head, row), q, d, &mut lift) {
                    end = end.max(sight.end);
                    scale_by(q, gain);
                    sums.weigh(&sight, head, q, w);
                    sums.write(&sight, (q, d), w, near);
                }
            }
            sums.cumulate_gradients();
            for key in 0..keys + sequence.absent {
                let token = sequence.key_start + key;
                // SAFETY: all of a unit's keys belong to its task.
                let (to_k, to_v) = unsafe {
                    let (batch, head) = (sequence.batch, unit.kv_head);
                    (sink.dk.row(batch, head, token, head_dim), sink.dv.row(batch, head, token, value_dim))
                };
                to_k.fill(T::ZERO);
                to_v.fill(T::ZERO);
                if key >= end || unit.ignores(key) {
                    // What stands in such a key may be NaN, which no factor of 0 would hold back.
                    continue;
                }
                dv.fill(T::ZERO);
                if problem.content {
                    let outer = &sums.outer[sums.place(key) * len..][..len];
                    let k = &sums.k[key * head_width..][..head_width];
                    thin([1, features, width], k, (outer, width), (dv, width));
                    dq.fill(T::ZERO);
                    add_row_dots(outer, width, &sums.v[key * width..][..width], &mut dq[..features]);
                    let (raw, _) = problem.pull_back_keys(&unit, key, 1, k, dq, key_sums, None, &mut lift);
                    store(raw, T::ONE, to_k);
                }
                if table.is_some() {
                    for part in [&*sums.before, &*sums.after, &*near] {
                        add_scaled(dv, T::ONE, &part[key * width..][..width]);
                    }
                }
                store(dv, T::ONE, to_v);
            }
        });
    }
    let query_sums =
        |index: usize, n: usize| vec![&table_gradients[index * per_unit + (n + 1) * entry - sums_len..][..sums_len]];
    let unit_sums = |index: usize| vec![&key_sums[index * sums_len..][..sums_len]];
    problem.write_feature_gradients(&query_sums, &unit_sums, [&[], &[]], false, parameters);
    if let Some(table) = &table {
        reduce_table(problem, table, table_gradients, per_unit, &|_| 1, parameters);
    }
    Ok(())
}
