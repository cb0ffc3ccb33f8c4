//! Operations on blocks of a few dozen rows: what the kernels are made of, generic over the vector register.
//!
//! A *block* is a slice of rows whose length (`row`, the distance from one row to the next) is a whole number of cache
//! lines; what stands between a row's last number and the end of its last line is 0. So no loop over a block's columns
//! has a remainder, and only reading from and writing to a caller's tensors ([`load`], [`store`]) looks at odd widths.

pub(crate) use super::log_sum::{
    bias_gradient, exponentials, factor, gated_mean, join, join_factored, key_gradient, project, row_cotangent,
    scale_by_exponents,
};
use super::vector::{Constants, Vector, exp_nonpositive, ln_1p_unit};
use crate::feature_map::FeatureMap;
use crate::real::Real;
use crate::scratch::line;
use crate::shape::Rows;

/// Rows of one block of the matrix product. With four columns of AVX-512 registers that is 16 accumulators, which
/// hide the latency of two fused products a cycle, and needs two loads for every four of them.
pub(crate) const BLOCK_ROWS: usize = 4;

/// `C = A·B` or `C += A·B` over blocks.
pub(crate) struct Product<'a, T> {
    /// Element `(i, p)` is `a[i·a_row + p·a_column]`: either stride may be 1, so a transposed block needs no copy.
    pub a: &'a [T],
    pub a_row: usize,
    pub a_column: usize,
    pub b: &'a [T],
    pub b_row: usize,
    pub c: &'a mut [T],
    pub c_row: usize,
    pub rows: usize,
    /// Columns of B and C; rounded up to whole registers.
    pub columns: usize,
    /// Columns of A, rows of B.
    pub depth: usize,
    pub accumulate: bool,
    /// Which elements of A can be other than 0.
    pub a_band: Band,
    /// Which elements of C are wanted. Others may be written or left.
    pub c_band: Band,
}

/// The elements `(i, j)` with `i + from ≤ j < i + to`.
#[derive(Clone, Copy)]
pub(crate) struct Band {
    pub from: isize,
    pub to: isize,
}

impl Band {
    /// Every element.
    pub const ALL: Self = Self { from: isize::MIN / 2, to: isize::MAX / 2 };

    /// The elements up to `diagonal` beyond the main one.
    pub fn up_to(diagonal: isize) -> Self {
        Self { to: diagonal + 1, ..Self::ALL }
    }

    /// The elements from `diagonal` beyond the main one.
    pub fn starting_at(diagonal: isize) -> Self {
        Self { from: diagonal, ..Self::ALL }
    }

    /// The columns below `end` that any of the rows `first..=last` has.
    pub(super) fn columns(self, first: usize, last: usize, end: usize) -> (usize, usize) {
        let clamp = |x: isize| x.clamp(0, end as isize) as usize;
        let from = clamp((first as isize).saturating_add(self.from));
        (from, clamp((last as isize).saturating_add(self.to)).max(from))
    }
}

/// Rows of a caller's tensor that are read or written soon. A product asks for them a few lines at a time, so that memory
/// answers while the processor multiplies; taken in one go they would make it wait for as long as a chunk's product takes.
#[derive(Clone, Copy)]
pub(crate) struct Ahead<T> {
    /// Nothing is read through it, and an address that is not there is passed over.
    start: *const T,
    stride: usize,
    count: usize,
    width: usize,
}

impl<T> Ahead<T> {
    /// The rows `from..to` of `len`, as far as they are there.
    pub fn new(rows: Rows<'_, T>, from: isize, to: isize, len: usize, width: usize) -> Self {
        let there = |row: isize| row.clamp(0, len as isize) as usize;
        let start = rows.data.as_ptr().wrapping_add(there(from) * rows.stride);
        Self { start, stride: rows.stride, count: there(to) - there(from), width }
    }

    /// `count` rows that are written.
    pub fn to_write(start: *const T, stride: usize, count: usize, width: usize) -> Self {
        Self { start, stride, count, width }
    }

    /// Asks for the `part`-th of `parts` parts.
    #[inline(always)]
    unsafe fn fetch<V: Vector<Element = T>>(&self, part: usize, parts: usize) {
        for row in part * self.count / parts..(part + 1) * self.count / parts {
            let start = self.start.wrapping_add(row * self.stride);
            for column in (0..self.width).step_by(line::<T>()) {
                // SAFETY: the caller has the instructions.
                unsafe { V::fetch(start.wrapping_add(column)) };
            }
        }
    }
}

/// Rows of which a few are asked for at a time: counts and no divisions, for loops of a hundred cycles.
pub(super) struct Fetching<'a, T> {
    /// What is left of the list under way.
    own: Ahead<T>,
    rest: &'a [Ahead<T>],
    quota: usize,
}

impl<'a, T: Copy> Fetching<'a, T> {
    /// All rows of a list, in so many times.
    pub fn new(rest: &'a [Ahead<T>], times: usize) -> Self {
        let rows = rest.iter().map(|ahead| ahead.count).sum::<usize>();
        let own = Ahead::to_write(std::ptr::null(), 0, 0, 0);
        Self { own, rest, quota: rows.div_ceil(times.max(1)) }
    }

    /// Asks for the next rows.
    #[inline(always)]
    pub unsafe fn next<V: Vector<Element = T>>(&mut self) {
        for _ in 0..self.quota {
            while self.own.count == 0 {
                let [first, rest @ ..] = self.rest else { return };
                (self.own, self.rest) = (*first, rest);
            }
            for column in (0..self.own.width).step_by(line::<T>()) {
                // SAFETY: the caller has the instructions.
                unsafe { V::fetch(self.own.start.wrapping_add(column)) };
            }
            self.own.start = self.own.start.wrapping_add(self.own.stride);
            self.own.count -= 1;
        }
    }
}

/// Calls `$body::<V, N>(arguments, column)` for the columns from `$from` on up to `$to`, in registers of which the last may reach
/// beyond, at most `$most` and 4 at a time: as many sums in flight hide the latency of the fused products.
macro_rules! by_whole_registers {
    ($from:expr, $to:expr, $most:expr, $body:ident($($argument:expr),*)) => {{
        let (mut column, to) = ($from, $to);
        while column < to {
            let registers = (to - column).div_ceil(V::LANES).min($most);
            match registers {
                4 => $body::<V, 4>($($argument,)* column),
                3 => $body::<V, 3>($($argument,)* column),
                2 => $body::<V, 2>($($argument,)* column),
                _ => $body::<V, 1>($($argument,)* column),
            }
            column += registers * V::LANES;
        }
    }};
}
pub(super) use by_whole_registers;

/// See [`Product`].
#[inline(always)]
pub(crate) unsafe fn product<V: Vector>(p: &mut Product<'_, V::Element>) {
    // SAFETY: forwarded to the caller.
    unsafe { product_fetching::<V>(p, None, &[]) }
}

/// A number for each row and a line of numbers for the columns, whose products are added to a matrix product, if any.
pub(crate) type Outer<'x, T> = Option<(&'x [T], &'x [T])>;

/// The same, which asks for rows meanwhile and adds the outer product.
#[inline(always)]
pub(crate) unsafe fn product_fetching<V: Vector>(
    p: &mut Product<'_, V::Element>,
    outer: Outer<'_, V::Element>,
    ahead: &[Ahead<V::Element>],
) {
    let columns = p.columns.next_multiple_of(V::LANES);
    if p.rows == 0 || columns == 0 {
        return;
    }
    assert!(p.depth == 0 || (p.rows - 1) * p.a_row + (p.depth - 1) * p.a_column < p.a.len());
    assert!(p.depth == 0 || (p.depth - 1) * p.b_row + columns <= p.b.len());
    assert!((p.rows - 1) * p.c_row + columns <= p.c.len());
    assert!(outer.is_none_or(|(factors, line)| p.rows <= factors.len() && columns <= line.len()));
    let mut row = 0;
    while row < p.rows {
        for ahead in ahead {
            // SAFETY: forwarded to the caller.
            unsafe { ahead.fetch::<V>(row / BLOCK_ROWS, p.rows.div_ceil(BLOCK_ROWS)) };
        }
        let last = (row + BLOCK_ROWS - 1).min(p.rows - 1);
        let (depth_from, depth_to) = p.a_band.columns(row, last, p.depth);
        let (from, to) = p.c_band.columns(row, last, columns);
        let from = from / V::LANES * V::LANES;
        // SAFETY: rows, columns and depth lie in the slices by the assertions above.
        unsafe { by_whole_registers!(from, to, V::BLOCK_COLUMNS, tile(p, outer, (row, last), (depth_from, depth_to))) };
        row += BLOCK_ROWS;
    }
}

/// `BLOCK_ROWS` rows and `N` registers of C. Rows beyond `last` repeat it, which writes the same numbers again.
// Counted loops over registers unroll; iterators over two arrays at once are not sure to.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn tile<V: Vector, const N: usize>(
    p: &mut Product<'_, V::Element>,
    outer: Outer<'_, V::Element>,
    (row, last): (usize, usize),
    (from, to): (usize, usize),
    column: usize,
) {
    // SAFETY: the caller checked that rows `row..=last`, `N` registers from `column` and `from..to` lie in the slices.
    unsafe {
        let rows: [usize; BLOCK_ROWS] = std::array::from_fn(|r| (row + r).min(last));
        let c = p.c.as_mut_ptr().add(column);
        let mut sums = [[V::splat(V::Element::ZERO); N]; BLOCK_ROWS];
        if p.accumulate {
            for r in 0..BLOCK_ROWS {
                for n in 0..N {
                    sums[r][n] = V::load(c.add(rows[r] * p.c_row + n * V::LANES));
                }
            }
        }
        if let Some((factors, line)) = outer {
            for n in 0..N {
                let line = V::load(line.as_ptr().add(column + n * V::LANES));
                for r in 0..BLOCK_ROWS {
                    sums[r][n] = V::splat(*factors.as_ptr().add(rows[r])).mul_add(line, sums[r][n]);
                }
            }
        }
        let a: [*const V::Element; BLOCK_ROWS] = std::array::from_fn(|r| p.a.as_ptr().wrapping_add(rows[r] * p.a_row));
        let b = p.b.as_ptr().wrapping_add(column);
        for k in from..to {
            let mut b_row = [V::splat(V::Element::ZERO); N];
            for n in 0..N {
                b_row[n] = V::load(b.add(k * p.b_row + n * V::LANES));
            }
            for r in 0..BLOCK_ROWS {
                let factor = V::splat(*a[r].add(k * p.a_column));
                for n in 0..N {
                    sums[r][n] = factor.mul_add(b_row[n], sums[r][n]);
                }
            }
        }
        for r in 0..BLOCK_ROWS {
            for n in 0..N {
                sums[r][n].store(c.add(rows[r] * p.c_row + n * V::LANES));
            }
        }
    }
}

/// `φ(x − shift)` of a register.
#[inline(always)]
pub(super) unsafe fn feature<V: Vector>(map: FeatureMap, x: V, shift: V) -> V
where
    V::Element: Constants,
{
    // SAFETY: forwarded to the caller.
    unsafe {
        let zero = V::splat(V::Element::ZERO);
        match map {
            FeatureMap::EluPlusOne => {
                // Where x is positive nobody looks at it.
                let exp = exp_nonpositive(x);
                x.if_positive(x.add(V::splat(V::Element::ONE)), exp)
            }
            FeatureMap::Relu => zero.max(x),
            FeatureMap::Softplus => zero.max(x).add(ln_1p_unit(exp_nonpositive(zero.sub(x.abs())))),
            FeatureMap::Exp => exp_nonpositive(x.sub(shift)),
            // Maps of whole rows are not made here.
            _ => x,
        }
    }
}

/// Reads `count` rows of `width` numbers from a caller's tensor into a block, through `φ(x − shift)`; rows whose entry
/// in `ignored` is true become 0 whatever stands in them. `shift` counts for [`FeatureMap::Exp`] alone.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn load<V: Vector>(
    map: FeatureMap,
    shift: V::Element,
    from: Rows<'_, V::Element>,
    count: usize,
    width: usize,
    ignored: Option<&[bool]>,
    to: &mut [V::Element],
    to_row: usize,
) where
    V::Element: Constants,
{
    // The map is looked at once, not for every register.
    macro_rules! load_as {
        ($map:ident) => {
            // SAFETY: forwarded to the caller.
            unsafe { load_through::<V>(FeatureMap::$map, shift, from, count, width, ignored, to, to_row) }
        };
    }
    match map {
        FeatureMap::EluPlusOne => load_as!(EluPlusOne),
        FeatureMap::Relu => load_as!(Relu),
        FeatureMap::Softplus => load_as!(Softplus),
        FeatureMap::Exp => load_as!(Exp),
        // Maps of whole rows are not made here.
        _ => load_as!(Identity),
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn load_through<V: Vector>(
    map: FeatureMap,
    shift: V::Element,
    from: Rows<'_, V::Element>,
    count: usize,
    width: usize,
    ignored: Option<&[bool]>,
    to: &mut [V::Element],
    to_row: usize,
) where
    V::Element: Constants,
{
    let whole = width / V::LANES * V::LANES;
    for row in 0..count {
        let to = &mut to[row * to_row..][..to_row];
        if ignored.is_some_and(|ignored| ignored[row]) {
            to.fill(V::Element::ZERO);
            continue;
        }
        let from = from.row(row, width);
        // SAFETY: `from` has `width` numbers, `to` a whole number of registers of at least that.
        unsafe {
            let shift = V::splat(shift);
            let mut column = 0;
            while column < whole {
                feature(map, V::load(from.as_ptr().add(column)), shift).store(to.as_mut_ptr().add(column));
                column += V::LANES;
            }
            if whole < width {
                to[whole..].fill(V::Element::ZERO);
                to[whole..width].copy_from_slice(&from[whole..]);
                feature(map, V::load(to.as_ptr().add(whole)), shift).store(to.as_mut_ptr().add(whole));
            }
            to[width..].fill(V::Element::ZERO);
        }
    }
}

/// `d ← d · φ′(x)` for rows of raw inputs `x` and their features `phi`.
#[inline(always)]
pub(crate) unsafe fn pull_back<V: Vector>(
    map: FeatureMap,
    x: Rows<'_, V::Element>,
    phi: &[V::Element],
    d: &mut [V::Element],
    count: usize,
    width: usize,
    row_length: usize,
) where
    V::Element: Constants,
{
    if map == FeatureMap::Identity || !map.is_elementwise() {
        return;
    }
    let mut tail = [V::Element::ZERO; 16];
    for row in 0..count {
        let x = x.row(row, width);
        let phi = &phi[row * row_length..][..row_length];
        let d = &mut d[row * row_length..][..row_length];
        let mut column = 0;
        while column < width {
            let source = if column + V::LANES <= width {
                x[column..].as_ptr()
            } else {
                tail[..width - column].copy_from_slice(&x[column..]);
                tail.as_ptr()
            };
            // SAFETY: `source` has a register of numbers, `phi` and `d` a whole number of registers a row.
            unsafe {
                let (zero, one) = (V::splat(V::Element::ZERO), V::splat(V::Element::ONE));
                let phi = V::load(phi.as_ptr().add(column));
                let slope = match map {
                    // eˣ below 0, where φ = eˣ ≤ 1, and 1 above, where φ > 1.
                    FeatureMap::EluPlusOne => one.min(phi),
                    FeatureMap::Relu => phi.if_positive(one, zero),
                    FeatureMap::Softplus => {
                        let x = V::load(source);
                        let small = exp_nonpositive(zero.sub(x.abs()));
                        x.if_positive(one, small).div(one.add(small))
                    }
                    _ => phi,
                };
                let at = d.as_mut_ptr().add(column);
                V::load(at).mul(slope).store(at);
            }
            column += V::LANES;
        }
    }
}

/// `to[i] = from[i] · factors[i]` for rows of a block, into rows that a caller holds; without factors a plain copy.
#[inline(always)]
pub(crate) unsafe fn store<V: Vector>(from: &[V::Element], factor: V::Element, to: &mut [V::Element]) {
    let whole = to.len() / V::LANES * V::LANES;
    // SAFETY: `whole` numbers lie in both slices.
    unsafe {
        let factor = V::splat(factor);
        let mut column = 0;
        assert!(from.len() >= to.len());
        while column < whole {
            V::load(from.as_ptr().add(column)).mul(factor).store(to.as_mut_ptr().add(column));
            column += V::LANES;
        }
    }
    for column in whole..to.len() {
        to[column] = from[column] * factor;
    }
}

/// Writes the transpose of a block of `rows × columns`; both are rounded up to whole registers, so `to` must have that
/// many rows and `from`'s rows beyond `rows` are read too.
#[inline(always)]
pub(crate) unsafe fn transpose<V: Vector>(
    from: &[V::Element],
    from_row: usize,
    rows: usize,
    columns: usize,
    to: &mut [V::Element],
    to_row: usize,
) {
    let (rows, columns) = (rows.next_multiple_of(V::LANES), columns.next_multiple_of(V::LANES));
    if rows == 0 || columns == 0 {
        return;
    }
    assert!((rows - 1) * from_row + columns <= from.len());
    assert!((columns - 1) * to_row + rows <= to.len());
    let mut row = 0;
    while row < rows {
        let mut column = 0;
        while column < columns {
            // SAFETY: the tile lies in both slices by the assertions above.
            unsafe {
                let from = from.as_ptr().add(row * from_row + column);
                V::transpose(from, from_row, to.as_mut_ptr().add(column * to_row + row), to_row);
            }
            column += V::LANES;
        }
        row += V::LANES;
    }
}

/// `to += scale · Σ_rows block[row]`.
#[inline(always)]
pub(crate) unsafe fn add_column_sums<V: Vector>(
    block: &[V::Element],
    row_length: usize,
    rows: usize,
    to: &mut [V::Element],
) {
    if rows == 0 {
        return;
    }
    assert!((rows - 1) * row_length + to.len() <= block.len() && to.len().is_multiple_of(V::LANES));
    // SAFETY: every row has its registers by the assertion above.
    unsafe { by_whole_registers!(0, to.len(), 4, add_register_sums(block, row_length, rows, to)) };
}

#[inline(always)]
unsafe fn add_register_sums<V: Vector, const N: usize>(
    block: &[V::Element],
    row_length: usize,
    rows: usize,
    to: &mut [V::Element],
    column: usize,
) {
    // SAFETY: the caller has `N` registers from `column` in every row and in `to`.
    unsafe {
        let from = |row: usize| block.as_ptr().add(row * row_length + column);
        let zero = [V::splat(V::Element::ZERO); N];
        let (mut even, mut odd) = (zero, zero);
        for row in (1..rows).step_by(2) {
            for n in 0..N {
                even[n] = even[n].add(V::load(from(row - 1).add(n * V::LANES)));
                odd[n] = odd[n].add(V::load(from(row).add(n * V::LANES)));
            }
        }
        for n in 0..N {
            if !rows.is_multiple_of(2) {
                even[n] = even[n].add(V::load(from(rows - 1).add(n * V::LANES)));
            }
            even[n] = even[n].add(odd[n]);
        }
        add_registers(even, to, column);
    }
}

/// `Σ x·y`.
#[inline(always)]
pub(crate) unsafe fn dot<V: Vector>(x: &[V::Element], y: &[V::Element]) -> V::Element {
    let whole = x.len() / V::LANES * V::LANES;
    assert!(x.len() <= y.len());
    // SAFETY: `whole` numbers lie in both slices.
    let mut sum = unsafe {
        let mut sums = V::splat(V::Element::ZERO);
        let mut column = 0;
        while column < whole {
            sums = V::load(x.as_ptr().add(column)).mul_add(V::load(y.as_ptr().add(column)), sums);
            column += V::LANES;
        }
        sums.sum()
    };
    for column in whole..x.len() {
        sum += x[column] * y[column];
    }
    sum
}

/// The largest number that is not NaN; −∞ for none.
#[inline(always)]
pub(crate) unsafe fn largest<V: Vector>(x: &[V::Element]) -> V::Element {
    let whole = x.len() / V::LANES * V::LANES;
    let mut lanes = [V::Element::NEG_INFINITY; 16];
    // SAFETY: `whole` numbers lie in the slice, a register in `lanes`.
    unsafe {
        let mut top = V::load(lanes.as_ptr());
        let mut column = 0;
        while column < whole {
            // The second operand stays where the first is NaN.
            top = V::load(x.as_ptr().add(column)).max(top);
            column += V::LANES;
        }
        top.store(lanes.as_mut_ptr());
    }
    lanes[..V::LANES].iter().chain(&x[whole..]).copied().fold(V::Element::NEG_INFINITY, V::Element::max)
}

/// `to[i] += block[i]·vector` for each row.
#[inline(always)]
pub(crate) unsafe fn add_row_dots<V: Vector>(
    block: &[V::Element],
    row_length: usize,
    vector: &[V::Element],
    to: &mut [V::Element],
) {
    for (row, to) in to.iter_mut().enumerate() {
        // SAFETY: forwarded to the caller.
        *to += unsafe { dot::<V>(&block[row * row_length..][..vector.len()], vector) };
    }
}

/// Makes the elements of a block outside `band` 0 and adds each row's sum to `sums`.
#[inline(always)]
pub(crate) unsafe fn mask_and_sum<V: Vector>(
    block: &mut [V::Element],
    row_length: usize,
    columns: usize,
    band: Band,
    sums: &mut [V::Element],
) {
    let columns = columns.next_multiple_of(V::LANES);
    for (row, total) in sums.iter_mut().enumerate() {
        let line = &mut block[row * row_length..][..columns];
        let (from, to) = band.columns(row, row, columns);
        line[..from].fill(V::Element::ZERO);
        line[to..].fill(V::Element::ZERO);
        // SAFETY: a row of `columns` numbers is a whole number of registers.
        unsafe {
            let mut sum = V::splat(V::Element::ZERO);
            let mut column = from / V::LANES * V::LANES;
            while column < to {
                sum = sum.add(V::load(line.as_ptr().add(column)));
                column += V::LANES;
            }
            *total += sum.sum();
        }
    }
}

/// `to = a·x + b·y`.
#[inline(always)]
pub(crate) unsafe fn combine<V: Vector>(
    to: &mut [V::Element],
    a: V::Element,
    x: &[V::Element],
    b: V::Element,
    y: &[V::Element],
) {
    let whole = to.len() / V::LANES * V::LANES;
    assert!(x.len() >= to.len() && y.len() >= to.len());
    // SAFETY: `whole` numbers lie in all three slices.
    unsafe {
        let (av, bv) = (V::splat(a), V::splat(b));
        let mut at = 0;
        while at < whole {
            let scaled = av.mul(V::load(x.as_ptr().add(at)));
            bv.mul_add(V::load(y.as_ptr().add(at)), scaled).store(to.as_mut_ptr().add(at));
            at += V::LANES;
        }
    }
    for at in whole..to.len() {
        to[at] = a * x[at] + b * y[at];
    }
}

/// `to += a·x`.
#[inline(always)]
pub(crate) unsafe fn add_scaled<V: Vector>(to: &mut [V::Element], a: V::Element, x: &[V::Element]) {
    let whole = to.len() / V::LANES * V::LANES;
    assert!(x.len() >= to.len());
    // SAFETY: `whole` numbers lie in both slices.
    unsafe {
        let av = V::splat(a);
        let mut at = 0;
        while at < whole {
            let place = to.as_mut_ptr().add(at);
            av.mul_add(V::load(x.as_ptr().add(at)), V::load(place)).store(place);
            at += V::LANES;
        }
    }
    for at in whole..to.len() {
        to[at] += a * x[at];
    }
}

/// `to ← to · x`, elementwise.
#[inline(always)]
pub(crate) unsafe fn multiply<V: Vector>(to: &mut [V::Element], x: &[V::Element]) {
    let whole = to.len() / V::LANES * V::LANES;
    assert!(x.len() >= to.len());
    // SAFETY: `whole` numbers lie in both slices.
    unsafe {
        let mut at = 0;
        while at < whole {
            let place = to.as_mut_ptr().add(at);
            V::load(place).mul(V::load(x.as_ptr().add(at))).store(place);
            at += V::LANES;
        }
    }
    for at in whole..to.len() {
        to[at] *= x[at];
    }
}

/// `to ← a · to`.
#[inline(always)]
pub(crate) unsafe fn scale<V: Vector>(to: &mut [V::Element], a: V::Element) {
    let whole = to.len() / V::LANES * V::LANES;
    // SAFETY: `whole` numbers lie in the slice.
    unsafe {
        let av = V::splat(a);
        let mut at = 0;
        while at < whole {
            let place = to.as_mut_ptr().add(at);
            V::load(place).mul(av).store(place);
            at += V::LANES;
        }
    }
    for x in &mut to[whole..] {
        *x *= a;
    }
}

/// Rows that enter a running sum one after the other: before row `n` the sum takes in `gain · rows[n]`, after it the
/// sum is multiplied by `decay`.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a, T> {
    pub rows: &'a [T],
    pub row_length: usize,
    pub count: usize,
    /// From the last row to the first.
    pub reverse: bool,
    pub gain: T,
    pub decay: T,
    /// One weight a row: what the sum is multiplied by where it is used; spaced by `weight_step`.
    pub weights: &'a [T],
    pub weight_step: usize,
}

impl<T> Run<'_, T> {
    #[inline(always)]
    fn order(&self, n: usize) -> usize {
        if self.reverse { self.count - 1 - n } else { n }
    }
}

/// Runs a sum over rows and adds it to those of `to`: `to[n] += weights[n] · sum`. Empty `to` only runs it.
#[inline(always)]
pub(crate) unsafe fn add_running<V: Vector>(
    sum: &mut [V::Element],
    run: Run<'_, V::Element>,
    to: &mut [V::Element],
    to_row: usize,
) {
    if run.count == 0 {
        return;
    }
    let width = sum.len();
    assert!(width.is_multiple_of(V::LANES) && (run.count - 1) * run.row_length + width <= run.rows.len());
    let writes = !to.is_empty();
    assert!(!writes || (run.count - 1) * to_row + width <= to.len());
    assert!(!writes || (run.count - 1) * run.weight_step < run.weights.len());
    let mut column = 0;
    while column < width {
        // SAFETY: each row of `rows` and `to` has a register at `column` by the assertions above.
        unsafe {
            let (gain, decay) = (V::splat(run.gain), V::splat(run.decay));
            let mut total = V::load(sum.as_ptr().add(column));
            for n in 0..run.count {
                let row = run.order(n);
                total = gain.mul_add(V::load(run.rows.as_ptr().add(row * run.row_length + column)), total);
                if writes {
                    let weight = V::splat(*run.weights.get_unchecked(row * run.weight_step));
                    let place = to.as_mut_ptr().add(row * to_row + column);
                    weight.mul_add(total, V::load(place)).store(place);
                }
                total = total.mul(decay);
            }
            total.store(sum.as_mut_ptr().add(column));
        }
        column += V::LANES;
    }
}

/// Runs a sum over rows and takes its products with those of `with`: `dots[n] += with[n] · sum`.
#[inline(always)]
pub(crate) unsafe fn running_dots<V: Vector>(
    sum: &mut [V::Element],
    run: Run<'_, V::Element>,
    with: &[V::Element],
    with_row: usize,
    dots: &mut [V::Element],
) {
    for n in 0..run.count {
        let row = run.order(n);
        // SAFETY: forwarded to the caller; the slices are indexed with checks.
        unsafe {
            add_scaled::<V>(sum, run.gain, &run.rows[row * run.row_length..][..sum.len()]);
            dots[row] += dot::<V>(sum, &with[row * with_row..][..sum.len()]);
            if run.decay != V::Element::ONE {
                scale::<V>(sum, run.decay);
            }
        }
    }
}

/// One token of a running sum: `S += k vᵀ`, then `out += qᵀ S`; `S` is `k.len() × v.len()`, row-major.
#[inline(always)]
pub(crate) unsafe fn absorb_token<V: Vector>(
    sum: &mut [V::Element],
    k: &[V::Element],
    v: &[V::Element],
    q: &[V::Element],
    out: &mut [V::Element],
) {
    let width = v.len();
    assert!(sum.len() >= k.len() * width && q.len() >= k.len() && out.len() >= width);
    let whole = width / V::LANES * V::LANES;
    // SAFETY: all are as long as the assertion says.
    unsafe { by_whole_registers!(0, whole, 4, absorb_columns(sum, k, v, q, out)) };
    for column in whole..width {
        for (feature, (&k, &q)) in k.iter().zip(q).enumerate() {
            let s = &mut sum[feature * width + column];
            *s += k * v[column];
            out[column] += q * *s;
        }
    }
}

#[inline(always)]
unsafe fn absorb_columns<V: Vector, const N: usize>(
    sum: &mut [V::Element],
    k: &[V::Element],
    v: &[V::Element],
    q: &[V::Element],
    out: &mut [V::Element],
    column: usize,
) {
    // SAFETY: the caller has `N` registers from `column` in every row of `sum`, in `v` and in `out`.
    unsafe {
        let mut total = [V::splat(V::Element::ZERO); N];
        let value: [V; N] = std::array::from_fn(|n| V::load(v.as_ptr().add(column + n * V::LANES)));
        for (feature, (&k, &q)) in k.iter().zip(q).enumerate() {
            let row = sum.as_mut_ptr().add(feature * v.len() + column);
            let (k, q) = (V::splat(k), V::splat(q));
            for n in 0..N {
                let s = k.mul_add(value[n], V::load(row.add(n * V::LANES)));
                s.store(row.add(n * V::LANES));
                total[n] = q.mul_add(s, total[n]);
            }
        }
        add_registers(total, out, column);
    }
}

/// `out += qᵀ S`, as [`absorb_token`] reads it.
#[inline(always)]
pub(crate) unsafe fn read_token<V: Vector>(sum: &[V::Element], q: &[V::Element], out: &mut [V::Element]) {
    let width = out.len();
    assert!(sum.len() >= q.len() * width);
    let whole = width / V::LANES * V::LANES;
    // SAFETY: the sum is as long as the assertion says.
    unsafe { by_whole_registers!(0, whole, 4, read_columns(sum, q, out)) };
    for column in whole..width {
        out[column] += q.iter().enumerate().map(|(feature, &q)| q * sum[feature * width + column]).sum::<V::Element>();
    }
}

#[inline(always)]
unsafe fn read_columns<V: Vector, const N: usize>(
    sum: &[V::Element],
    q: &[V::Element],
    out: &mut [V::Element],
    column: usize,
) {
    // SAFETY: the caller has `N` registers from `column` in every row of `sum` and in `out`.
    unsafe {
        let mut total = [V::splat(V::Element::ZERO); N];
        for (feature, &q) in q.iter().enumerate() {
            let row = sum.as_ptr().add(feature * out.len() + column);
            let q = V::splat(q);
            for (n, total) in total.iter_mut().enumerate() {
                *total = q.mul_add(V::load(row.add(n * V::LANES)), *total);
            }
        }
        add_registers(total, out, column);
    }
}

/// Adds registers to the numbers from `column` on.
#[inline(always)]
unsafe fn add_registers<V: Vector, const N: usize>(total: [V; N], to: &mut [V::Element], column: usize) {
    for (n, total) in total.into_iter().enumerate() {
        // SAFETY: the caller has `N` registers there.
        unsafe {
            let at = to.as_mut_ptr().add(column + n * V::LANES);
            V::load(at).add(total).store(at);
        }
    }
}

/// `high + low += factor · terms` by Knuth's exact sum: `low` keeps what `high` loses, with no demand on which is larger.
#[inline(always)]
pub(crate) unsafe fn add_compensated<V: Vector>(
    high: &mut [V::Element],
    low: &mut [V::Element],
    terms: &[V::Element],
    factor: V::Element,
) {
    for ((high, low), &term) in high.iter_mut().zip(low).zip(terms) {
        let more = term * factor + *low;
        let sum = *high + more;
        let shown = sum - *high;
        let error = (*high - (sum - shown)) + (more - shown);
        *high = sum;
        // An infinite or NaN sum has no error to keep.
        *low = if error.is_finite() { error } else { V::Element::ZERO };
    }
}

/// Makes the elements of a block outside `band` 0.
#[inline(always)]
pub(crate) unsafe fn mask<V: Vector>(
    block: &mut [V::Element],
    row_length: usize,
    rows: usize,
    columns: usize,
    band: Band,
) {
    let columns = columns.next_multiple_of(V::LANES);
    for row in 0..rows {
        let line = &mut block[row * row_length..][..columns];
        let (from, to) = band.columns(row, row, columns);
        line[..from].fill(V::Element::ZERO);
        line[to..].fill(V::Element::ZERO);
    }
}

/// Whether all of a caller's numbers are finite.
#[inline(always)]
pub(crate) unsafe fn all_finite<V: Vector>(from: Rows<'_, V::Element>, count: usize, width: usize) -> bool {
    // SAFETY: every register lies in its row, which is a slice of `width` numbers.
    unsafe {
        // x·0 is 0 for finite x and NaN else; NaN survives the sums, of which several wait for each other less.
        let zero = V::splat(V::Element::ZERO);
        let mut sums = [zero; 4];
        let mut rest = V::Element::ZERO;
        for row in 0..count {
            let row = from.row(row, width);
            let mut at = 0;
            while at + 4 * V::LANES <= width {
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load(row.as_ptr().add(at + n * V::LANES)).mul_add(zero, *sum);
                }
                at += 4 * V::LANES;
            }
            while at + V::LANES <= width {
                sums[0] = V::load(row.as_ptr().add(at)).mul_add(zero, sums[0]);
                at += V::LANES;
            }
            for &x in &row[at..] {
                rest += x * V::Element::ZERO;
            }
        }
        let [a, b, c, d] = sums;
        a.add(b).add(c.add(d)).sum() + rest == V::Element::ZERO
    }
}
