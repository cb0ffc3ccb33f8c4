//! The angles of a call: from the parameters and positions to what turns the rows of one chunk.

use smallvec::SmallVec;

use super::{Fourier, FourierNormalizer, Positions, Tensors, Wave};
use crate::call::{Arena, Dims};
use crate::error::{Error, expect};
use crate::feature_map::elementwise::Features;
use crate::fourier::rotate::{AngleSums, Angles, Rotate, Rotation, SumAngles, Turn, Unrotate, Unrotated};
use crate::fourier::turns::{AddTurns, CosSin, TurnRates, is_double};
use crate::kernelized::running_sum::add_compensated;
use crate::simd::block::{add_scaled, dot, multiply};
use crate::simd::{Real, dispatch};

/// Which rows: queries of a head, or the keys of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Query(usize),
    Key,
}

#[derive(Clone, Copy)]
pub(crate) struct TokenRange<'x> {
    pub side: Side,
    pub batch: usize,
    pub kv_head: usize,
    /// The first row on its axis of the call.
    pub token: usize,
    pub count: usize,
    /// Its counted position.
    pub position: f64,
    /// Where the call begins: gradients are summed by positions from there, since far from 0 those of queries and keys nearly cancel.
    pub origin: f64,
    /// Rows whose positions mean nothing.
    pub ignored: Option<&'x [bool]>,
}

/// Rows that have a base in common: the angles of so many steps stand in a table that the first cache keeps.
const GROUP: usize = 8;

/// Vectors of [`Rotations::sums_len`] before those of `a`.
const RATES: usize = 5;

impl TokenRange<'_> {
    fn ignores(&self, row: usize) -> bool {
        self.ignored.is_some_and(|ignored| ignored[row])
    }
}

/// Numbers of one head's angles or features, which a step forms for every token: on the stack. More go to the heap.
type Angular<T> = SmallVec<[T; 64]>;

/// The parameters of a call, ready for use.
pub(crate) struct Rotations<'a, T: 'static> {
    pub fourier: Fourier,
    /// Features before they are turned.
    pub features: usize,
    angles: usize,
    axes: usize,
    dims: Dims,
    /// Turns for a step, `[kv_heads, axes, angles]`, and for `f64` what rounding took from each.
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
    /// Cosines and sines of the bases of each group of rows, `2 × angles` each: without and, if there is one, with the gain.
    bases: [&'s mut [T]; 2],
    /// The base that those of the first groups are formed from.
    before: &'s mut [T],
}

/// Cosines and sines of the angles that so many steps make at the rates `a`, radians a step.
pub(crate) fn angles_after<T: Real>(a: &[T], steps: f64) -> [Vec<T>; 2] {
    let [mut rates, mut rests, mut turns] = [0; 3].map(|_| vec![0.0; a.len()]);
    dispatch(TurnRates { radians: a, step: 1, turns: &mut rates, rests: &mut rests });
    dispatch(AddTurns { exact: is_double::<T>(), turns: &rates, rests: &rests, steps, to: &mut turns });
    let (mut cos, mut sin) = (vec![T::ZERO; a.len()], vec![T::ZERO; a.len()]);
    dispatch(CosSin { turns: &turns, cos: &mut cos, sin: &mut sin });
    [cos, sin]
}

/// How a block of rows is divided: rows of a group and groups, and how many rows of angles each list of [`RotationBuffers`] has.
struct Division {
    group: usize,
    groups: usize,
    table: usize,
    starts: usize,
    own: usize,
    bases: usize,
}

pub(crate) struct RotationBuffers<'s, T> {
    /// Rows of a group, and groups from one base that has an angle of its own to the next.
    group: usize,
    groups: usize,
    /// For counted positions: the angles of `0, 1, 2, …` steps within a group, and, if there are several, of `0, 1, 2, …`
    /// groups, `angles` each.
    table: [&'s mut [T]; 2],
    starts: [&'s mut [T]; 2],
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
            let expected = || "finite numbers".into();
            let got = || format!("{position:?} for token {token} of batch entry {batch}");
            expect(!matters || position.iter().all(|x| x.is_finite()), operation, name, expected, got)?;
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
        let (angles, axes) = (self.angles, self.axes);
        let (a, b) = (a.unwrap_or(&[]), b.unwrap_or(&[]));
        (self.slopes, self.gains, self.positions) = (a, c.unwrap_or(&[]), positions);
        let [rates, rests] = &mut self.rates;
        let most = a.len().max(b.len());
        rates.resize(most, 0.0);
        rests.resize(if is_double::<T>() { most } else { 0 }, 0.0);
        // As rates of one step, where those of steps come to stand afterwards.
        self.phases.resize(b.len(), 0.0);
        self.phases.fill(0.0);
        dispatch(TurnRates { radians: b, step: 1, turns: rates, rests });
        dispatch(AddTurns { exact: is_double::<T>(), turns: rates, rests, steps: 1.0, to: &mut self.phases });
        for head in 0..self.dims.kv_heads {
            for axis in 0..axes {
                let from = &a[(head * angles * axes + axis).min(a.len())..];
                let to = (head * axes + axis) * angles..(head * axes + axis + 1) * angles;
                let rests = if is_double::<T>() { &mut rests[to.clone()] } else { &mut [] };
                dispatch(TurnRates { radians: from, step: axes, turns: &mut rates[to], rests });
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
        self.fourier.positions != Positions::Counted
    }

    /// How blocks of so many rows are divided.
    fn division(&self, rows: usize) -> Division {
        let rows = rows.max(1);
        if self.given() {
            return Division { group: rows, groups: 1, table: 0, starts: 0, own: rows, bases: 1 };
        }
        let group = GROUP.min(rows);
        let groups = rows.div_ceil(group);
        let starts = if groups == 1 { 0 } else { groups };
        // Counted from anywhere, rows may reach into one more.
        Division { group, groups, table: group, starts, own: 0, bases: groups + usize::from(group > 1) }
    }

    pub fn buffers<'s>(&self, rows: usize, arena: &mut Arena<'s, T>) -> RotationBuffers<'s, T> {
        let Division { group, groups, table, starts, own, bases } = self.division(rows);
        let with_gain = if self.fourier.has_gain() { bases } else { 0 };
        let mut take = |rows: usize| arena.take(rows * self.angles);
        let (table, starts) = ([take(table), take(table)], [take(starts), take(starts)]);
        let mut side = || {
            let bases = [take(2 * bases), take(2 * with_gain)];
            SideAngles { cos: take(own), sin: take(own), bases, before: take(2) }
        };
        let sides = [side(), side()];
        RotationBuffers { group, groups, table, starts, sides }
    }

    /// Adds the turns of some of a head's angles after so many steps along an axis.
    fn add_turns(&self, (kv_head, axis): (usize, usize), angles: std::ops::Range<usize>, steps: f64, to: &mut [f64]) {
        let first = (kv_head * self.axes + axis) * self.angles;
        let place = first + angles.start..first + angles.end;
        let [rates, rests] = &self.rates;
        let rests = if is_double::<T>() { &rests[place.clone()] } else { &[] };
        dispatch(AddTurns { exact: is_double::<T>(), turns: &rates[place], rests, steps, to });
    }

    /// Prepares for the rows of one head.
    pub fn start(&self, kv_head: usize, buffers: &mut RotationBuffers<'_, T>) {
        if self.given() || self.angles == 0 {
            return;
        }
        for ([cos, sin], steps) in [(&mut buffers.table, 1), (&mut buffers.starts, buffers.group)] {
            let rows = cos.chunks_exact_mut(self.angles).zip(sin.chunks_exact_mut(self.angles));
            for (row, (cos, sin)) in rows.enumerate() {
                if row == 0 {
                    cos.fill(T::ONE);
                    sin.fill(T::ZERO);
                } else {
                    self.form(kv_head, None, |_| (row * steps) as f64, [cos, sin]);
                }
            }
        }
    }

    /// Forms the cosines and sines of one row's angles, at a position by axis.
    fn form(&self, kv_head: usize, phase: Option<&[f64]>, position: impl Fn(usize) -> f64, [cos, sin]: [&mut [T]; 2]) {
        let mut turns = [0.0; 64];
        for from in (0..self.angles).step_by(turns.len()) {
            let to = (from + turns.len()).min(self.angles);
            let turns = &mut turns[..to - from];
            match phase {
                Some(phase) => turns.copy_from_slice(&phase[from..to]),
                None => turns.fill(0.0),
            }
            for axis in 0..self.axes {
                self.add_turns((kv_head, axis), from..to, position(axis), turns);
            }
            dispatch(CosSin { turns, cos: &mut cos[from..to], sin: &mut sin[from..to] });
        }
    }

    /// The position of one row of a range, on one axis.
    pub fn position(&self, range: &TokenRange<'_>, row: usize, axis: usize) -> T {
        match self.positions {
            None => T::from_f64(range.position + row as f64),
            Some(_) if range.ignores(row) => T::ZERO,
            Some((queries, keys)) => {
                let (positions, tokens) = match range.side {
                    Side::Query(_) => (queries, self.dims.queries),
                    Side::Key => (keys, self.dims.keys),
                };
                positions[(range.batch * tokens + range.token + row) * self.axes + axis]
            }
        }
    }

    /// The place of a range's first row in its group. Groups stand at multiples of their rows, so that the bits of an angle
    /// depend on its position alone.
    fn place(&self, range: &TokenRange<'_>, group: usize) -> usize {
        // A count, so a whole number.
        if group == 1 || self.given() { 0 } else { (range.position as i64).rem_euclid(group as i64) as usize }
    }

    /// Forms the angles of a range, for [`rotate`](Self::rotate) and then [`unrotate`](Self::unrotate) of that side.
    fn load(&self, range: &TokenRange<'_>, buffers: &mut RotationBuffers<'_, T>) {
        let angles = self.angles;
        if angles == 0 {
            return;
        }
        let (group, place) = (buffers.group, self.place(range, buffers.group));
        let SideAngles { cos, sin, bases: [bases, with_gain], before } =
            &mut buffers.sides[usize::from(range.side == Side::Key)];
        let phase = match range.side {
            Side::Query(head) if !self.phases.is_empty() => Some(&self.phases[head * angles..][..angles]),
            _ => None,
        };
        let mut formed = 2 * angles;
        if self.given() {
            let (cosines, sines) = bases.split_at_mut(angles);
            cosines.fill(T::ONE);
            sines.fill(T::ZERO);
            let rows = cos.chunks_exact_mut(angles).zip(sin.chunks_exact_mut(angles)).take(range.count);
            for (row, (cos, sin)) in rows.enumerate() {
                self.form(range.kv_head, phase, |axis| self.position(range, row, axis).to_f64(), [cos, sin]);
            }
        } else {
            formed *= (place + range.count).div_ceil(group);
            let groups = buffers.groups as i64;
            // Where the group stands whose base the next are formed from.
            let mut whole = None;
            for at in (0..formed).step_by(2 * angles) {
                let position = range.position - place as f64 + (at / (2 * angles) * group) as f64;
                let after = if groups == 1 { 0 } else { (position as i64 / group as i64).rem_euclid(groups) as usize };
                let (done, base) = bases.split_at_mut(at);
                let base = &mut base[..2 * angles];
                if after == 0 {
                    let (cos, sin) = base.split_at_mut(angles);
                    self.form(range.kv_head, phase, |_| position, [cos, sin]);
                    whole = Some(at);
                    continue;
                }
                if at == 0 {
                    let (cos, sin) = before.split_at_mut(angles);
                    self.form(range.kv_head, phase, |_| position - (after * group) as f64, [cos, sin]);
                }
                let whole = whole.map_or(&**before, |at| &done[at..at + 2 * angles]);
                let [cos, sin] = &buffers.starts;
                let more = after * angles..(after + 1) * angles;
                dispatch(SumAngles { base: whole, angle: [&cos[more.clone()], &sin[more]], to: base });
            }
        }
        if let Some(gain) = self.gain(range.side) {
            with_gain[..formed].copy_from_slice(&bases[..formed]);
            with_gain[..formed].chunks_exact_mut(angles).for_each(|numbers| multiply(numbers, gain));
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

    /// The rotation of a range over features in rows of `x_row`, into blocks that start every `stride`.
    fn rotation<'x>(
        &'x self,
        range: &TokenRange<'_>,
        (x_row, stride): (usize, usize),
        gained: bool,
        buffers: &'x RotationBuffers<'_, T>,
    ) -> Rotation<'x, T> {
        let own = &buffers.sides[usize::from(range.side == Side::Key)];
        let angles = self.angles;
        let [plain, with_gain] = &own.bases;
        let bases: &[T] = if gained && self.gain(range.side).is_some() { with_gain } else { plain };
        let (cos, sin): (&[T], &[T]) =
            if self.given() { (own.cos, own.sin) } else { (buffers.table[0], buffers.table[1]) };
        Rotation {
            turn: self.turn(),
            x_row,
            count: range.count,
            width: self.features,
            angles: Angles {
                cos,
                sin,
                row: angles,
                group: buffers.group,
                place: self.place(range, buffers.group),
                base: [bases, &bases[angles..]],
                base_row: 2 * angles,
            },
            stride,
            rest: self.rest(range.side),
        }
    }

    /// Turns the features `x` of a range, rows of `x_row`, into rows of `to_row` whose blocks start every `stride`. Adds the sums of
    /// their columns to `sums`, if it is not empty.
    #[allow(clippy::too_many_arguments)]
    pub fn rotate(
        &self,
        range: &TokenRange<'_>,
        (x, x_row): (Features<'_, T>, usize),
        (to, to_row): (&mut [T], usize),
        stride: usize,
        sums: &mut [T],
        buffers: &mut RotationBuffers<'_, T>,
    ) {
        self.load(range, buffers);
        dispatch(Rotate { r: &self.rotation(range, (x_row, stride), true, buffers), x, to, to_row, sums });
    }

    /// Numbers in the gradients of the parameters that one block of rows adds to, `width` for each vector: of `c`, `β`, `b`, what
    /// rounding took from that of `b`, its share of one block of rows, and of `a` by axis.
    pub fn sums_len(&self, width: usize) -> usize {
        (RATES + self.axes) * width
    }

    /// Takes the gradients `d` of the rows that were last turned on this side back to their features, in `dx`, and adds
    /// those of the parameters to `sums`, as [`sums_len`](Self::sums_len) says. Those of given positions are added to the rows that
    /// `positions` gives.
    #[allow(clippy::too_many_arguments)]
    pub fn unrotate(
        &self,
        range: &TokenRange<'_>,
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
        let (d_phase, sums) = sums.split_at_mut(width);
        let (d_phase_low, sums) = sums.split_at_mut(width);
        let (of_block, d_rates) = sums.split_at_mut(width);
        of_block.fill(T::ZERO);
        let gain = self.gain(range.side);
        let wants_rest = matches!(range.side, Side::Query(_)) && !self.rests.is_empty();
        let sums = (!self.given()).then(|| AngleSums {
            position: T::from_f64(range.position - range.origin),
            d_phase: &mut *of_block,
            d_rate: &mut *d_rates,
        });
        let d_gain = if gain.is_some() { d_gain } else { &mut [] };
        let d_rest = if wants_rest { d_rest } else { &mut [] };
        let to = Unrotated { d: &mut *d, d_row, gain, dx, d_gain, d_rest, angles: sums };
        dispatch(Unrotate { r: &self.rotation(range, (x_row, width), false, buffers), x, to });
        if !self.given() {
            add_compensated(d_phase, d_phase_low, of_block, T::ONE);
            return;
        }
        let angles = self.angles;
        for row in 0..range.count {
            let angle = &d[row * d_row..][..angles];
            add_scaled(&mut d_phase[..angles], T::ONE, angle);
            for axis in 0..self.axes {
                let to = &mut d_rates[axis * width..][..angles];
                add_scaled(to, self.position(range, row, axis), angle);
                let slopes = &self.slopes[range.kv_head * angles * self.axes..][..angles * self.axes];
                let d = if self.axes == 1 {
                    dot(angle, slopes)
                } else {
                    let slopes = slopes.iter().skip(axis).step_by(self.axes);
                    angle.iter().zip(slopes).map(|(&d, &slope)| d * slope).sum()
                };
                d_positions(row, axis, d);
            }
        }
    }

    /// Writes the gradients of the parameters, all but positions, from sums as [`unrotate`](Self::unrotate) forms them:
    /// or adds them. `query_sums` gives those of a head, `key_sums` those of a key/value head, in a fixed order, each with the position
    /// that its rows are counted from.
    pub fn write_gradients<'x>(
        &self,
        width: usize,
        query_sums: impl Fn(usize) -> Vec<(f64, &'x [T])>,
        key_sums: impl Fn(usize) -> Vec<(f64, &'x [T])>,
        parameters: &[&'a [T]],
        accumulate: bool,
        gradients: &mut [&mut [T]],
    ) {
        let inputs = self.fourier.tensors(parameters);
        let mut rest = gradients.iter_mut();
        let Tensors { mut a, mut b, mut c, mut beta, .. } = self.fourier.split(&mut rest);
        // Sums over all segments in `f64`: parts for queries and for keys nearly cancel far from position 0.
        let total = |parts: &[(f64, &[T])], number: &dyn Fn(f64, &[T], usize) -> f64, len: usize| -> Vec<f64> {
            (0..len).map(|k| parts.iter().map(|(origin, part)| number(*origin, part, k)).sum()).collect()
        };
        let phase = |part: &[T], k: usize| part[2 * width + k].to_f64() + part[3 * width + k].to_f64();
        for kv_head in 0..self.dims.kv_heads {
            let heads = self.dims.heads_of(kv_head);
            if let Some(a) = &mut a {
                let parts: Vec<(f64, &[T])> = heads.clone().flat_map(&query_sums).chain(key_sums(kv_head)).collect();
                for axis in 0..self.axes {
                    let number = |origin: f64, part: &[T], k: usize| {
                        // Of given positions the sums are whole.
                        let before = if self.given() { 0.0 } else { origin * phase(part, k) };
                        part[(RATES + axis) * width + k].to_f64() + before
                    };
                    for (k, sum) in total(&parts, &number, self.angles).into_iter().enumerate() {
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
                    write(&mut b[place.clone()], &total(&parts, &|_, part, k| phase(part, k), self.features));
                }
                let mut d_gain = total(&parts, &|_, part, k| part[k].to_f64(), self.features);
                let mut d_rest = total(&parts, &|_, part, k| part[width + k].to_f64(), self.features);
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
