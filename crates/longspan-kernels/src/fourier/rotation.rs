//! The angles of a call: from the parameters and positions to what turns the rows of one chunk.

use smallvec::{SmallVec, smallvec};

use super::{Fourier, FourierNormalizer, Tensors, Wave};
use crate::error::{Error, expect};
use crate::real::Real;
use crate::scratch::{Arena, line};
use crate::shape::Dims;
use crate::simd::Ops;
use crate::simd::rotation::{AngleSums, Angles, Rotation, Turn, Unrotated, is_double};

/// Which rows: queries of a head, or the keys of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Query(usize),
    Key,
}

/// Rows whose angles are wanted.
#[derive(Clone, Copy)]
pub(crate) struct Span<'x> {
    pub side: Side,
    pub batch: usize,
    pub kv_head: usize,
    /// The first row on its axis of the call.
    pub token: usize,
    pub count: usize,
    /// Its counted position.
    pub position: f64,
    /// Rows whose positions mean nothing.
    pub ignored: Option<&'x [bool]>,
}

/// Rows of a span that share a base.
#[derive(Debug, Clone, Copy, Default)]
struct Stretch {
    from: usize,
    count: usize,
    /// Where the table has the first of them.
    place: usize,
}

impl Span<'_> {
    fn ignores(&self, row: usize) -> bool {
        self.ignored.is_some_and(|ignored| ignored[row])
    }
}

/// Numbers of one head's angles or features, which a step forms for every token: on the stack. More go to the heap.
type Angular<T> = SmallVec<[T; 64]>;

/// The parameters of a call, ready for use.
pub(crate) struct Rotations<'a, T: 'static> {
    pub fourier: Fourier,
    ops: &'static Ops<T>,
    /// Features before they are turned.
    pub features: usize,
    angles: usize,
    axes: usize,
    dims: Dims,
    /// Turns for a step, `[kv_heads, axes, angles]`, and for doubles what rounding took from each.
    rates: [Angular<f64>; 2],
    /// Radians for a step, `[kv_heads, angles, axes]`: what takes the gradients of angles to positions.
    slopes: &'a [T],
    /// Turns, `[heads, angles]`, or empty.
    phases: Angular<f64>,
    /// `c`, `[heads, features]`, or empty.
    gains: &'a [T],
    /// What queries' unturned features are multiplied by, `[heads, features]`, or empty where that is 1.
    rests: Angular<T>,
    ones: Angular<T>,
    positions: Option<(&'a [T], &'a [T])>,
}

/// Angles of one side's last block.
struct SideAngles<'s, T> {
    /// For given positions: `rows × angles` each.
    cos: &'s mut [T],
    sin: &'s mut [T],
    /// Cosines and sines of the bases, without and, if there is one, with the gain, `4 × angles` each: of the rows before a multiple of the
    /// table's rows, and of those after it.
    base: &'s mut [T],
}

/// Cosines and sines of the angles that so many steps make at the rates `a`, radians a step.
pub(crate) fn angles_after<T: Real>(a: &[T], steps: f64) -> [Vec<T>; 2] {
    let ops = T::ops();
    let [mut rates, mut rests, mut turns] = [0; 3].map(|_| vec![0.0; a.len()]);
    ops.rates(a, 1, &mut rates, &mut rests);
    ops.add_turns(&rates, &rests, steps, &mut turns);
    let (mut cos, mut sin) = (vec![T::ZERO; a.len()], vec![T::ZERO; a.len()]);
    ops.cos_sin(&turns, &mut cos, &mut sin);
    [cos, sin]
}

/// Working memory of one task.
pub(crate) struct RotationBuffers<'s, T> {
    /// For counted positions: the angles of `0, 1, 2, …` steps, `rows × angles` each.
    table: [&'s mut [T]; 2],
    sides: [SideAngles<'s, T>; 2],
}

/// Checks that the given positions of queries, and of keys that are not ignored, are finite.
pub(crate) fn check_positions<T: Real>(
    fourier: &Fourier,
    operation: &'static str,
    dims: &Dims,
    parameters: &[&[T]],
    ignored: impl Fn(usize, usize) -> bool,
) -> Result<(), Error> {
    let Some((queries, keys)) = fourier.tensors(parameters).positions else { return Ok(()) };
    let axes = fourier.positions.axes();
    for (name, positions, tokens) in [("query_positions", queries, dims.queries), ("key_positions", keys, dims.keys)] {
        for (n, position) in positions.chunks_exact(axes.max(1)).enumerate() {
            let (batch, token) = (n / tokens, n % tokens);
            let matters = name == "query_positions" || !ignored(batch, token);
            expect(
                !matters || position.iter().all(|x| x.is_finite()),
                operation,
                name,
                || "finite numbers".into(),
                || format!("{position:?} for token {token} of batch entry {batch}"),
            )?;
        }
    }
    Ok(())
}

impl<'a, T: Real> Rotations<'a, T> {
    /// For parameters of checked lengths.
    pub fn new(fourier: Fourier, dims: Dims, features: usize, parameters: &[&'a [T]]) -> Self {
        let mut this = Self::empty(fourier, dims, features);
        this.fill(parameters);
        this
    }

    /// To be [filled](Self::fill).
    pub fn empty(fourier: Fourier, dims: Dims, features: usize) -> Self {
        Self {
            fourier,
            ops: T::ops(),
            features,
            angles: fourier.angles(features),
            axes: fourier.positions.axes(),
            dims,
            rates: Default::default(),
            slopes: &[],
            phases: Angular::new(),
            gains: &[],
            rests: Angular::new(),
            ones: Angular::new(),
            positions: None,
        }
    }

    /// Takes parameters of checked lengths in the place of those before. A step does this for every head: lists that are
    /// long enough are left so, and nothing is moved.
    pub fn fill(&mut self, parameters: &[&'a [T]]) {
        let Tensors { a, b, c, beta, positions } = self.fourier.tensors(parameters);
        let (angles, axes, ops) = (self.angles, self.axes, self.ops);
        let (a, b) = (a.unwrap_or(&[]), b.unwrap_or(&[]));
        (self.slopes, self.gains, self.positions) = (a, c.unwrap_or(&[]), positions);
        let [rates, rests] = &mut self.rates;
        let most = a.len().max(b.len());
        rates.resize(most, 0.0);
        rests.resize(if is_double::<T>() { most } else { 0 }, 0.0);
        // As rates of one step, where those of steps come to stand afterwards.
        self.phases.resize(b.len(), 0.0);
        self.phases.fill(0.0);
        ops.rates(b, 1, rates, rests);
        ops.add_turns(rates, rests, 1.0, &mut self.phases);
        for head in 0..self.dims.kv_heads {
            for axis in 0..axes {
                let from = &a[(head * angles * axes + axis).min(a.len())..];
                let to = (head * axes + axis) * angles..(head * axes + axis + 1) * angles;
                let rests = if is_double::<T>() { &mut rests[to.clone()] } else { &mut [] };
                ops.rates(from, axes, &mut rates[to], rests);
            }
        }
        self.rests.clear();
        match (self.fourier.normalizer, beta, c) {
            (FourierNormalizer::Dominant, Some(beta), Some(c)) => {
                let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
                let sums = c.iter().zip(beta).map(|(c, beta)| c.to_f64().abs() + softplus(beta.to_f64()));
                self.rests.extend(sums.map(T::from_f64));
            }
            (_, Some(beta), _) => self.rests.extend_from_slice(beta),
            _ => {}
        }
        self.ones.resize(self.features, T::ONE);
    }

    /// Whether positions are given, so that they have gradients.
    pub fn given(&self) -> bool {
        self.positions.is_some()
    }

    /// Numbers that [`RotationBuffers`] for blocks of `rows` take from an arena.
    pub fn buffers_len(&self, rows: usize) -> usize {
        let line = line::<T>();
        (4 * rows * self.angles + 16 * self.angles) + 6 * line
    }

    pub fn buffers<'s>(&self, rows: usize, arena: &mut Arena<'s, T>) -> RotationBuffers<'s, T> {
        let block = rows * self.angles;
        let (table, given) = if self.given() { (0, block) } else { (block, 0) };
        let mut side =
            || SideAngles { cos: arena.take(given), sin: arena.take(given), base: arena.take(8 * self.angles) };
        let sides = [side(), side()];
        RotationBuffers { table: [arena.take(table), arena.take(table)], sides }
    }

    /// Adds the turns of some of a head's angles after so many steps along an axis.
    fn add_turns(&self, (kv_head, axis): (usize, usize), angles: std::ops::Range<usize>, steps: f64, to: &mut [f64]) {
        let first = (kv_head * self.axes + axis) * self.angles;
        let place = first + angles.start..first + angles.end;
        let [rates, rests] = &self.rates;
        let rests = if is_double::<T>() { &rests[place.clone()] } else { &[] };
        self.ops.add_turns(&rates[place], rests, steps, to);
    }

    /// Prepares for the rows of one head.
    pub fn start(&self, kv_head: usize, buffers: &mut RotationBuffers<'_, T>) {
        if self.given() || self.angles == 0 {
            return;
        }
        let [cos, sin] = &mut buffers.table;
        let first = self.angles.min(cos.len());
        cos[..first].fill(T::ONE);
        sin[..first].fill(T::ZERO);
        // A step has this row alone.
        if cos.len() < 2 * self.angles {
            return;
        }
        let mut turns: Angular<f64> = smallvec![0.0; self.angles];
        let rows = cos.chunks_exact_mut(self.angles).zip(sin.chunks_exact_mut(self.angles));
        for (row, (cos, sin)) in rows.enumerate().skip(1) {
            turns.fill(0.0);
            self.add_turns((kv_head, 0), 0..self.angles, row as f64, &mut turns);
            self.ops.cos_sin(&turns, cos, sin);
        }
    }

    /// The position of one row of a span, on one axis.
    pub fn position(&self, span: &Span<'_>, row: usize, axis: usize) -> T {
        match self.positions {
            None => T::from_f64(span.position + row as f64),
            Some(_) if span.ignores(row) => T::ZERO,
            Some((queries, keys)) => {
                let (positions, tokens) = match span.side {
                    Side::Query(_) => (queries, self.dims.queries),
                    Side::Key => (keys, self.dims.keys),
                };
                positions[(span.batch * tokens + span.token + row) * self.axes + axis]
            }
        }
    }

    /// The stretches of a span whose rows share a base: first row, count, and the first row's place in the table. Bases
    /// stand at multiples of the table's rows, so that the bits of an angle depend on its position alone.
    fn stretches(&self, span: &Span<'_>, buffers: &RotationBuffers<'_, T>) -> [Stretch; 2] {
        if self.given() {
            return [Stretch { from: 0, count: span.count, place: 0 }, Stretch::default()];
        }
        let rows = (buffers.table[0].len() / self.angles.max(1)).max(1);
        // A count, so a whole number.
        let place = (span.position as i64).rem_euclid(rows as i64) as usize;
        let count = span.count.min(rows - place);
        [Stretch { from: 0, count, place }, Stretch { from: count, count: span.count - count, place: 0 }]
    }

    /// Forms the angles of a span, for [`rotate`](Self::rotate) and then [`unrotate`](Self::unrotate) of that side.
    fn load(&self, span: &Span<'_>, buffers: &mut RotationBuffers<'_, T>) {
        let angles = self.angles;
        let stretches = self.stretches(span, buffers);
        let side = &mut buffers.sides[usize::from(span.side == Side::Key)];
        let phase = match span.side {
            Side::Query(head) if !self.phases.is_empty() => Some(&self.phases[head * angles..][..angles]),
            _ => None,
        };
        let mut turns = [0.0; 64];
        for (stretch, base) in stretches.iter().zip(side.base.chunks_exact_mut((4 * angles).max(1))) {
            if stretch.count == 0 {
                continue;
            }
            let (plain, with_gain) = base.split_at_mut(2 * angles);
            let (cos, sin) = plain.split_at_mut(angles);
            for from in (0..angles).step_by(turns.len()) {
                let to = (from + turns.len()).min(angles);
                let turns = &mut turns[..to - from];
                let start = |turns: &mut [f64]| match phase {
                    Some(phase) => turns.copy_from_slice(&phase[from..to]),
                    None => turns.fill(0.0),
                };
                if self.given() {
                    cos[from..to].fill(T::ONE);
                    sin[from..to].fill(T::ZERO);
                    for row in 0..span.count {
                        start(turns);
                        for axis in 0..self.axes {
                            let position = self.position(span, row, axis).to_f64();
                            self.add_turns((span.kv_head, axis), from..to, position, turns);
                        }
                        let place = row * angles + from..row * angles + to;
                        self.ops.cos_sin(turns, &mut side.cos[place.clone()], &mut side.sin[place]);
                    }
                } else {
                    start(turns);
                    let position = span.position + stretch.from as f64 - stretch.place as f64;
                    self.add_turns((span.kv_head, 0), from..to, position, turns);
                    self.ops.cos_sin(turns, &mut cos[from..to], &mut sin[from..to]);
                }
            }
            if let Some(gain) = self.gain(span.side) {
                with_gain.copy_from_slice(plain);
                self.ops.multiply(&mut with_gain[..angles], gain);
                self.ops.multiply(&mut with_gain[angles..], gain);
            }
        }
    }

    fn gain(&self, side: Side) -> Option<&[T]> {
        match side {
            Side::Query(head) if !self.gains.is_empty() => Some(&self.gains[head * self.features..][..self.features]),
            _ => None,
        }
    }

    fn rest(&self, side: Side) -> Option<&[T]> {
        if !self.fourier.has_unturned() {
            return None;
        }
        Some(match side {
            Side::Query(head) if !self.rests.is_empty() => &self.rests[head * self.features..][..self.features],
            _ => &self.ones,
        })
    }

    fn turn(&self) -> Turn {
        match self.fourier.wave {
            Wave::Each => Turn::Each,
            Wave::Pairs => Turn::Pairs,
        }
    }

    /// The rotation of one stretch of a span, the `n`-th, over features `x` in rows of `x_row`.
    fn rotation<'x>(
        &'x self,
        side: Side,
        (n, stretch): (usize, Stretch),
        (x, x_row, stride): (&'x [T], usize, usize),
        gained: bool,
        buffers: &'x RotationBuffers<'_, T>,
    ) -> Rotation<'x, T> {
        let own = &buffers.sides[usize::from(side == Side::Key)];
        let angles = self.angles;
        let gained = gained && self.gain(side).is_some();
        let base = &own.base[(4 * n + if gained { 2 } else { 0 }) * angles..];
        let (cos, sin): (&[T], &[T]) =
            if self.given() { (own.cos, own.sin) } else { (buffers.table[0], buffers.table[1]) };
        let first = stretch.place * angles;
        Rotation {
            turn: self.turn(),
            x: &x[stretch.from * x_row..],
            x_row,
            count: stretch.count,
            width: self.features,
            angles: Angles {
                cos: &cos[first..],
                sin: &sin[first..],
                row: angles,
                base: [&base[..angles], &base[angles..2 * angles]],
            },
            stride,
            rest: self.rest(side),
        }
    }

    /// Turns the features `x` of a span, rows of `x_row`, into rows of `to_row` whose blocks start every `stride`.
    #[allow(clippy::too_many_arguments)]
    pub fn rotate(
        &self,
        span: &Span<'_>,
        x: &[T],
        x_row: usize,
        to: &mut [T],
        to_row: usize,
        stride: usize,
        buffers: &mut RotationBuffers<'_, T>,
    ) {
        self.load(span, buffers);
        for (n, stretch) in self.stretches(span, buffers).into_iter().enumerate().filter(|(_, s)| s.count > 0) {
            let rotation = self.rotation(span.side, (n, stretch), (x, x_row, stride), true, buffers);
            self.ops.rotate(&rotation, &mut to[stretch.from * to_row..], to_row);
        }
    }

    /// Numbers in the gradients of the parameters that one block of rows adds to, `width` for each vector.
    pub fn sums_len(&self, width: usize) -> usize {
        (3 + self.axes) * width
    }

    /// Takes the gradients `d` of the rows that were last turned on this side back to their features, in `dx`, and adds
    /// those of the parameters to `sums`: of `c`, `β`, `b` and `a` by axis, `width` each. Those of given positions are
    /// added to the rows that `positions` gives.
    #[allow(clippy::too_many_arguments)]
    pub fn unrotate(
        &self,
        span: &Span<'_>,
        (x, x_row): (&[T], usize),
        (d, d_row): (&mut [T], usize),
        dx: &mut [T],
        sums: &mut [T],
        d_positions: impl Fn(usize, usize, T),
        buffers: &RotationBuffers<'_, T>,
    ) {
        let width = x_row;
        let (d_gain, sums) = sums.split_at_mut(width);
        let (d_rest, sums) = sums.split_at_mut(width);
        let (d_phase, d_rates) = sums.split_at_mut(width);
        let gain = self.gain(span.side);
        let wants_rest = matches!(span.side, Side::Query(_)) && !self.rests.is_empty();
        for (n, stretch) in self.stretches(span, buffers).into_iter().enumerate().filter(|(_, s)| s.count > 0) {
            let rotation = self.rotation(span.side, (n, stretch), (x, x_row, width), false, buffers);
            let sums = (!self.given()).then(|| AngleSums {
                position: T::from_f64(span.position + stretch.from as f64),
                d_phase: &mut *d_phase,
                d_rate: &mut *d_rates,
            });
            self.ops.unrotate(
                &rotation,
                &mut Unrotated {
                    d: &mut d[stretch.from * d_row..],
                    d_row,
                    gain,
                    dx: &mut dx[stretch.from * x_row..],
                    d_gain: if gain.is_some() { &mut *d_gain } else { &mut [] },
                    d_rest: if wants_rest { &mut *d_rest } else { &mut [] },
                    angles: sums,
                },
            );
        }
        if !self.given() {
            return;
        }
        let angles = self.angles;
        for row in 0..span.count {
            let angle = &d[row * d_row..][..angles];
            self.ops.add_scaled(&mut d_phase[..angles], T::ONE, angle);
            for axis in 0..self.axes {
                let to = &mut d_rates[axis * width..][..angles];
                self.ops.add_scaled(to, self.position(span, row, axis), angle);
                let slopes = &self.slopes[span.kv_head * angles * self.axes..][..angles * self.axes];
                let d = if self.axes == 1 {
                    self.ops.dot(angle, slopes)
                } else {
                    let slopes = slopes.iter().skip(axis).step_by(self.axes);
                    angle.iter().zip(slopes).map(|(&d, &slope)| d * slope).sum()
                };
                d_positions(row, axis, d);
            }
        }
    }

    /// Writes the gradients of the parameters, all but positions, from sums as [`unrotate`](Self::unrotate) forms them:
    /// or adds them;
    /// `query_sums` gives those of a head, `key_sums` those of a key/value head, in a fixed order.
    pub fn write_gradients<'x>(
        &self,
        width: usize,
        query_sums: impl Fn(usize) -> Vec<&'x [T]>,
        key_sums: impl Fn(usize) -> Vec<&'x [T]>,
        parameters: &[&'a [T]],
        accumulate: bool,
        gradients: &mut [&mut [T]],
    ) {
        let inputs = self.fourier.tensors(parameters);
        let mut rest = gradients.iter_mut();
        let Tensors { mut a, mut b, mut c, mut beta, .. } = self.fourier.split(&mut rest);
        // Sums over all segments in doubles: parts for queries and for keys nearly cancel far from position 0.
        let total = |parts: &[&[T]], from: usize, len: usize| -> Vec<f64> {
            let mut sum = vec![0.0; len];
            for part in parts {
                sum.iter_mut().zip(&part[from..]).for_each(|(sum, x)| *sum += x.to_f64());
            }
            sum
        };
        for kv_head in 0..self.dims.kv_heads {
            let group = self.dims.group();
            let heads = kv_head * group..(kv_head + 1) * group;
            if let Some(a) = &mut a {
                let parts: Vec<&[T]> = heads.clone().flat_map(&query_sums).chain(key_sums(kv_head)).collect();
                for axis in 0..self.axes {
                    for (k, sum) in total(&parts, (3 + axis) * width, self.angles).into_iter().enumerate() {
                        let to = &mut a[(kv_head * self.angles + k) * self.axes + axis];
                        *to = T::from_f64(sum + if accumulate { to.to_f64() } else { 0.0 });
                    }
                }
            }
            for head in heads {
                let parts = query_sums(head);
                let place = head * self.features..(head + 1) * self.features;
                let write = |to: &mut [T], from: &[f64]| {
                    for (to, &x) in to.iter_mut().zip(from) {
                        *to = T::from_f64(x + if accumulate { to.to_f64() } else { 0.0 });
                    }
                };
                if let Some(b) = &mut b {
                    write(&mut b[place.clone()], &total(&parts, 2 * width, self.features));
                }
                let mut d_gain = total(&parts, 0, self.features);
                let mut d_rest = total(&parts, width, self.features);
                if let (FourierNormalizer::Dominant, Some(c), Some(beta)) =
                    (self.fourier.normalizer, inputs.c, inputs.beta)
                {
                    // β = |c| + softplus(beta).
                    for (k, n) in place.clone().enumerate() {
                        let c = c[n].to_f64();
                        d_gain[k] += if c == 0.0 { 0.0 } else { c.signum() * d_rest[k] };
                        d_rest[k] /= 1.0 + (-beta[n].to_f64()).exp();
                    }
                }
                if let Some(c) = &mut c {
                    write(&mut c[place.clone()], &d_gain);
                }
                if let Some(beta) = &mut beta {
                    write(&mut beta[place], &d_rest);
                }
            }
        }
    }
}
