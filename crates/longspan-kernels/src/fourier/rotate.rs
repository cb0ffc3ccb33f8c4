//! The rotation of blocks of features by angles, and of gradients back.

use crate::feature_map::FeatureMap;
use crate::feature_map::elementwise::{Features, LoadFeatures, Shift, feature, for_each_map};
use crate::simd::block::AddColumnSums;
use crate::simd::rows::covers;
use crate::simd::{Real, Vector, operation};

/// How a row of `m` features is turned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Every feature by an angle of its own into a pair: `[x cos, x sin]`, 2m features.
    Each,
    /// Feature `k` and feature `k + m/2` as a pair, in place: m features.
    Pairs,
}

/// The angles of a block of rows, in groups of `group` rows that have a base in common: the row that is the `n`-th of its group
/// has the angle of the group's base plus that of row `n` of `cos` and `sin`.
#[derive(Clone, Copy)]
pub(crate) struct Angles<'a, T> {
    pub cos: &'a [T],
    pub sin: &'a [T],
    /// From one row's angles to the next.
    pub row: usize,
    /// Rows of a group, at least 1.
    pub group: usize,
    /// The first row's place in its group.
    pub place: usize,
    /// Cosines and sines of the groups' bases, and from one base to the next.
    pub base: [&'a [T]; 2],
    pub base_row: usize,
}

impl<T> Angles<'_, T> {
    /// The angles of a row in its group, and its base.
    #[inline(always)]
    fn of_row(&self, row: usize) -> [[&[T]; 2]; 2] {
        let place = self.place + row;
        let (own, base) = (place % self.group * self.row, place / self.group * self.base_row);
        [[&self.cos[own..], &self.sin[own..]], self.base.map(|bases| &bases[base..])]
    }
}

/// How rows of features are turned, which stand unturned beside it where `rest` is given.
pub(crate) struct Rotation<'a, T> {
    pub turn: Turn,
    /// From one row of `width` features to the next.
    pub x_row: usize,
    pub count: usize,
    pub width: usize,
    pub angles: Angles<'a, T>,
    /// Numbers from one block of the turned row to the next.
    pub stride: usize,
    /// What the unturned features are multiplied by.
    pub rest: Option<&'a [T]>,
}

impl<T: Real> Rotation<'_, T> {
    /// Blocks before the unturned one.
    fn turned(&self) -> usize {
        match self.turn {
            Turn::Each => 2,
            Turn::Pairs => 1,
        }
    }
}

/// The cosine and sine of `base` and `angle` together.
#[inline(always)]
unsafe fn sum<V: Vector>([base_cos, base_sin]: [V; 2], [cos, sin]: [V; 2]) -> [V; 2] {
    // SAFETY: forwarded to the caller.
    unsafe {
        let minus = V::splat(V::Element::ZERO).sub(base_sin);
        [minus.mul_add(sin, base_cos.mul(cos)), base_sin.mul_add(cos, base_cos.mul(sin))]
    }
}

/// Hands every row and the cosines and sines of its angles at `column` to `visit`. A step has one group: no divisions.
///
/// # Safety
/// As for [`Vector`]; the angles of these rows must have a register at `column`.
#[inline(always)]
unsafe fn each_row<V: Vector>(
    angles: &Angles<'_, V::Element>,
    rows: usize,
    column: usize,
    mut visit: impl FnMut(usize, [V; 2]),
) {
    let (mut from, mut place, mut base) = (0, angles.place, column);
    while from < rows {
        let count = (angles.group - place).min(rows - from);
        // SAFETY: forwarded to the caller.
        unsafe {
            let own = angles.base.map(|numbers| V::load(numbers.as_ptr().add(base)));
            for row in 0..count {
                let at = (place + row) * angles.row + column;
                let angle = [V::load(angles.cos.as_ptr().add(at)), V::load(angles.sin.as_ptr().add(at))];
                visit(from + row, sum(own, angle));
            }
        }
        (from, place, base) = (from + count, 0, base + angles.base_row);
    }
}

/// The same of single numbers.
#[inline(always)]
fn sum_of_one<T: Real>([base_cos, base_sin]: [T; 2], [cos, sin]: [T; 2]) -> [T; 2] {
    [base_cos * cos - base_sin * sin, base_sin * cos + base_cos * sin]
}

// Writes the cosines and sines, one after the other, of the angles `base` and `angle` together.
operation!(SumAngles, |base: &'a [T], angle: [&'a [T]; 2], to: &'a mut [T]| {
    let (base_cos, base_sin) = base.split_at(base.len() / 2);
    let (to_cos, to_sin) = to.split_at_mut(base_cos.len());
    let numbers = to_cos.iter_mut().zip(to_sin).zip(base_cos.iter().zip(base_sin)).zip(angle[0].iter().zip(angle[1]));
    for (((to_cos, to_sin), (&base_cos, &base_sin)), (&cos, &sin)) in numbers {
        [*to_cos, *to_sin] = sum_of_one([base_cos, base_sin], [cos, sin]);
    }
});

impl<T: Real> Rotation<'_, T> {
    /// That every number it speaks of is there, and that of as many rows of features.
    fn check(&self, features: usize) {
        let Some(last) = self.count.checked_sub(1) else { return };
        let Angles { cos, sin, row, group, place, base, base_row } = self.angles;
        let angles = match self.turn {
            Turn::Each => self.width,
            Turn::Pairs => self.width / 2,
        };
        assert!(self.width <= self.x_row && last * self.x_row + self.width <= features);
        let end = place + self.count;
        let deepest = group.min(end) - 1;
        assert!(place < group && deepest * row + angles <= cos.len() && deepest * row + angles <= sin.len());
        let last_base = if end <= group { 0 } else { (end - 1) / group };
        assert!(base.iter().all(|base| last_base * base_row + angles <= base.len()));
        assert!(self.rest.is_none_or(|rest| rest.len() >= self.width));
        assert!(self.stride >= self.width);
    }
}

// Writes turned rows. Numbers that belong to no feature become 0. Adds the sums of the columns to `sums`, if it is not empty.
operation!(Rotate, |r: &'a Rotation<'a, T>, x: Features<'a, T>, to: &'a mut [T], to_row: usize, sums: &'a mut [T]| {
    let (width, stride, x_row) = (r.width, r.stride, r.x_row);
    let beyond = r.turned() * stride + if r.rest.is_some() { width } else { 0 };
    assert!(r.count * to_row <= to.len() && beyond <= to_row && (sums.is_empty() || sums.len() == to_row));
    let registers = width / V::LANES * V::LANES;
    let gaps = registers < width || width < stride || beyond < to_row;
    let x: &[V::Element] = match x {
        Features::Formed(x) => x,
        Features::Mapped { map, shift, from, ignored: None, to: x, keep } if r.turn == Turn::Each && !gaps => {
            r.check(x.len());
            assert!(covers(&from, r.count, width));
            let x = x.as_mut_ptr();
            // Exponentials and the memory that rotation waits for take their time together.
            // SAFETY: every number that is read or written is there by the assertions above.
            for_each_map!(map, MAP => unsafe {
                let shift = V::splat(shift);
                let mapped = |row: usize, column: usize| {
                    let raw = V::load(from.data.as_ptr().add(row * from.stride + column));
                    let feature = feature(MAP, raw, shift);
                    if keep {
                        feature.store(x.add(row * x_row + column));
                    }
                    feature
                };
                rotate_registers::<V>(r, registers, mapped, to, to_row, sums);
            });
            return;
        }
        Features::Mapped { map, shift, from, ignored, to, .. } => {
            // SAFETY: forwarded to the caller.
            unsafe {
                let shift = Shift::One(shift);
                LoadFeatures { map, shift, from, count: r.count, width, ignored, to, to_row: x_row }.run::<V>()
            };
            to
        }
    };
    r.check(x.len());
    let whole = match r.turn {
        // SAFETY: every number that is read or written is there by the assertions above.
        Turn::Each => unsafe {
            let formed = |row: usize, column: usize| V::load(x.as_ptr().add(row * x_row + column));
            let sums = if gaps { &mut [] } else { &mut *sums };
            rotate_registers::<V>(r, registers, formed, to, to_row, sums);
            registers
        },
        Turn::Pairs => 0,
    };
    if r.turn == Turn::Each && !gaps {
        return;
    }
    for row in 0..r.count {
        let x = &x[row * x_row..][..width];
        let [[cos, sin], base] = r.angles.of_row(row);
        let to = &mut to[row * to_row..][..to_row];
        let (turned, after) = to.split_at_mut(r.turned() * stride);
        match r.turn {
            Turn::Each => {
                let (first, second) = turned.split_at_mut(stride);
                for k in whole..width {
                    let [c, s] = sum_of_one(base.map(|base| base[k]), [cos[k], sin[k]]);
                    first[k] = x[k] * c;
                    second[k] = x[k] * s;
                }
                first[width..].fill(V::Element::ZERO);
                second[width..].fill(V::Element::ZERO);
            }
            Turn::Pairs => {
                let half = width / 2;
                let (cos, sin) = (&cos[..half], &sin[..half]);
                let base = base.map(|base| &base[..half]);
                turned[width..].fill(V::Element::ZERO);
                let (first, second) = turned[..width].split_at_mut(half);
                let (low, high) = x.split_at(half);
                for k in 0..half {
                    let [c, s] = sum_of_one(base.map(|base| base[k]), [cos[k], sin[k]]);
                    first[k] = low[k] * c - high[k] * s;
                    second[k] = low[k] * s + high[k] * c;
                }
            }
        }
        let Some(rest) = r.rest else {
            after.fill(V::Element::ZERO);
            continue;
        };
        let (unturned, nothing) = after.split_at_mut(width);
        nothing.fill(V::Element::ZERO);
        for ((to, &x), &rest) in unturned.iter_mut().zip(x).zip(rest).skip(whole) {
            *to = x * rest;
        }
    }
    if !sums.is_empty() {
        // SAFETY: forwarded to the caller.
        unsafe { AddColumnSums { block: to, row_length: to_row, rows: r.count, to: sums }.run::<V>() };
    }
});

/// Writes the registers up to column `end` of rows turned by [`Turn::Each`], whose features `x` gives by row and column. Register after
/// register down all rows, so that what rows have in common stays where it is. Adds the sums of the columns to `sums`, if it is not empty.
///
/// # Safety
/// As for [`Vector`]; the rotation must be checked, and `to` have a row for each of its rows, without gaps if there are sums.
#[inline(always)]
unsafe fn rotate_registers<V: Vector>(
    r: &Rotation<'_, V::Element>,
    end: usize,
    x: impl Fn(usize, usize) -> V,
    to: &mut [V::Element],
    to_row: usize,
    sums: &mut [V::Element],
) {
    for column in (0..end).step_by(V::LANES) {
        // SAFETY: a register at `column` lies in each of these rows.
        unsafe {
            let rest = r.rest.map(|rest| V::load(rest.as_ptr().add(column)));
            let mut totals = [V::splat(V::Element::ZERO); 3];
            each_row::<V>(&r.angles, r.count, column, |row, [c, s]| {
                let x = x(row, column);
                let to = to.as_mut_ptr().add(row * to_row + column);
                let (first, second) = (x.mul(c), x.mul(s));
                first.store(to);
                second.store(to.add(r.stride));
                totals[0] = totals[0].add(first);
                totals[1] = totals[1].add(second);
                if let Some(rest) = rest {
                    let unturned = x.mul(rest);
                    unturned.store(to.add(2 * r.stride));
                    totals[2] = totals[2].add(unturned);
                }
            });
            if !sums.is_empty() {
                let blocks = 2 + usize::from(rest.is_some());
                for (n, total) in totals.into_iter().enumerate().take(blocks) {
                    let at = sums.as_mut_ptr().add(n * r.stride + column);
                    V::load(at).add(total).store(at);
                }
            }
        }
    }
}

/// Where the gradients of a rotation go.
pub(crate) struct Unrotated<'a, T> {
    /// The gradients of turned rows; on return the first block of each holds those of the angles, if no sums of them are
    /// wanted.
    pub d: &'a mut [T],
    pub d_row: usize,
    /// What each pair of [`Turn::Each`] was multiplied by beside its angle, if not 1.
    pub gain: Option<&'a [T]>,
    /// The gradients of the features, in rows [`Rotation::x_row`] apart.
    pub dx: &'a mut [T],
    /// Sums over rows of the gradients of `gain` and [`Rotation::rest`], added to; empty if not wanted.
    pub d_gain: &'a mut [T],
    pub d_rest: &'a mut [T],
    /// Sums over rows of the gradients of the angles.
    pub angles: Option<AngleSums<'a, T>>,
}

/// Sums of the gradients of angles that grow with the position, over rows one position apart.
pub(crate) struct AngleSums<'a, T> {
    /// The position of the first row, counted from the call's own start.
    pub position: T,
    /// Takes the gradients.
    pub d_phase: &'a mut [T],
    /// Takes the gradients times the rows' positions.
    pub d_rate: &'a mut [T],
}

// Takes gradients of turned rows back to features, angles and factors. The base angles are those without `gain`.
operation!(Unrotate, |r: &'a Rotation<'a, T>, x: &'a [T], to: Unrotated<'a, T>| {
    let mut to = to;
    r.check(x.len());
    let (width, stride) = (r.width, r.stride);
    let (count, zero) = (r.count, V::Element::ZERO);
    assert!(count * to.d_row <= to.d.len() && count * r.x_row <= to.dx.len() && width <= r.x_row);
    assert!(r.turned() * stride + if r.rest.is_some() { width } else { 0 } <= to.d_row);
    assert!(to.gain.is_none_or(|gain| gain.len() >= width));
    assert!([&to.d_gain, &to.d_rest].iter().all(|sums| sums.is_empty() || sums.len() >= width));
    assert!(to.angles.as_ref().is_none_or(|sums| sums.d_phase.len() >= width && sums.d_rate.len() >= width));
    if r.turn == Turn::Pairs {
        unrotate_pairs(r, x, &mut to);
        return;
    }
    let whole = width / V::LANES * V::LANES;
    for column in (0..whole).step_by(V::LANES) {
        // SAFETY: a register at `column` lies in each row and in every list that is not empty, by the assertions above.
        unsafe { unrotate_register::<V>(r, x, &mut to, column) };
    }
    if whole == width && width == r.x_row {
        return;
    }
    for row in 0..count {
        let x = &x[row * r.x_row..][..width];
        let [[cos, sin], base] = r.angles.of_row(row);
        let dx = &mut to.dx[row * r.x_row..][..r.x_row];
        dx[width..].fill(zero);
        let d = &mut to.d[row * to.d_row..][..to.d_row];
        for k in whole..width {
            let [c, s] = sum_of_one(base.map(|base| base[k]), [cos[k], sin[k]]);
            let gain = to.gain.map_or(V::Element::ONE, |gain| gain[k]);
            let (first, second) = (d[k], d[stride + k]);
            let along = first * c + second * s;
            let angle = x[k] * (second * c - first * s) * gain;
            dx[k] = along * gain;
            if !to.d_gain.is_empty() {
                to.d_gain[k] += along * x[k];
            }
            if let Some(rest) = r.rest {
                let unturned = d[2 * stride + k];
                dx[k] += unturned * rest[k];
                if !to.d_rest.is_empty() {
                    to.d_rest[k] += unturned * x[k];
                }
            }
            match &mut to.angles {
                Some(sums) => {
                    sums.d_phase[k] += angle;
                    sums.d_rate[k] += angle * (sums.position + V::Element::from_f64(row as f64));
                }
                None => d[k] = angle,
            }
        }
    }
});

/// One register of each block, down all rows.
///
/// # Safety
/// As for [`Vector`]; a register at `column` must lie in each row and in every list that is not empty.
#[inline(always)]
unsafe fn unrotate_register<V: Vector>(
    r: &Rotation<'_, V::Element>,
    x: &[V::Element],
    to: &mut Unrotated<'_, V::Element>,
    column: usize,
) {
    // SAFETY: forwarded to the caller.
    unsafe {
        let zero = V::splat(V::Element::ZERO);
        let one = V::splat(V::Element::ONE);
        let gain = to.gain.map_or(one, |gain| V::load(gain.as_ptr().add(column)));
        let rest = r.rest.map(|rest| V::load(rest.as_ptr().add(column)));
        let (mut d_gain, mut d_rest, mut d_phase, mut d_rate) = (zero, zero, zero, zero);
        let mut steps = zero;
        let sums_angles = to.angles.is_some();
        each_row::<V>(&r.angles, r.count, column, |row, [c, s]| {
            let at = row * r.x_row + column;
            let x = V::load(x.as_ptr().add(at));
            let d = to.d.as_mut_ptr().add(row * to.d_row + column);
            let (first, second) = (V::load(d), V::load(d.add(r.stride)));
            let along = first.mul_add(c, second.mul(s));
            let across = second.mul_add(c, zero.sub(first).mul(s));
            let mut dx = along.mul(gain);
            d_gain = along.mul_add(x, d_gain);
            if let Some(rest) = rest {
                let unturned = V::load(d.add(2 * r.stride));
                dx = unturned.mul_add(rest, dx);
                d_rest = unturned.mul_add(x, d_rest);
            }
            dx.store(to.dx.as_mut_ptr().add(at));
            let angle = across.mul(x).mul(gain);
            if sums_angles {
                d_phase = d_phase.add(angle);
                d_rate = angle.mul_add(steps, d_rate);
                steps = steps.add(one);
            } else {
                angle.store(d);
            }
        });
        let add = |to: &mut [V::Element], more: V| {
            if !to.is_empty() {
                let at = to.as_mut_ptr().add(column);
                V::load(at).add(more).store(at);
            }
        };
        add(to.d_gain, d_gain);
        add(to.d_rest, d_rest);
        if let Some(sums) = &mut to.angles {
            add(sums.d_phase, d_phase);
            add(sums.d_rate, d_phase.mul_add(V::splat(sums.position), d_rate));
        }
    }
}

/// For [`Turn::Pairs`], which have neither gain nor rest among their weights.
#[inline(always)]
fn unrotate_pairs<T: Real>(r: &Rotation<'_, T>, x: &[T], to: &mut Unrotated<'_, T>) {
    let (width, half) = (r.width, r.width / 2);
    for row in 0..r.count {
        let x = &x[row * r.x_row..][..width];
        let [[cos, sin], base] = r.angles.of_row(row).map(|angles| angles.map(|numbers| &numbers[..half]));
        let dx = &mut to.dx[row * r.x_row..][..r.x_row];
        dx[width..].fill(T::ZERO);
        let dx = &mut dx[..width];
        let d = &mut to.d[row * to.d_row..][..to.d_row];
        let (turned, after) = d.split_at_mut(r.turned() * r.stride);
        let (first, second) = turned[..width].split_at_mut(half);
        let (low, high) = x.split_at(half);
        let (d_low, d_high) = dx.split_at_mut(half);
        for k in 0..half {
            let [c, s] = sum_of_one(base.map(|base| base[k]), [cos[k], sin[k]]);
            d_low[k] = first[k] * c + second[k] * s;
            d_high[k] = second[k] * c - first[k] * s;
            first[k] = low[k] * d_high[k] - high[k] * d_low[k];
        }
        if let Some(sums) = &mut to.angles {
            let position = sums.position + T::from_f64(row as f64);
            for ((&angle, d_phase), d_rate) in first.iter().zip(&mut *sums.d_phase).zip(&mut *sums.d_rate) {
                *d_phase += angle;
                *d_rate += angle * position;
            }
        }
        let Some(rest) = r.rest else { continue };
        let unturned = &after[..width];
        if !to.d_rest.is_empty() {
            for ((sum, &g), &x) in to.d_rest[..width].iter_mut().zip(unturned).zip(x) {
                *sum += g * x;
            }
        }
        for ((dx, &g), &rest) in dx.iter_mut().zip(unturned).zip(&rest[..width]) {
            *dx += g * rest;
        }
    }
}
