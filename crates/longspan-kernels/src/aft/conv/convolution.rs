//! Sums over windows whose weights are all relative to one exponent: the weight of a pair is that of its item times that of its tap.

use crate::aft::chunks::CHUNK;
use crate::simd::product::{BLOCK_ROWS, by_whole_registers};
use crate::simd::{Real, Vector, operation};

// Writes a line of weights `kernel[p]·items[n + p]` for each tap, and adds up `Σ_p kernel[p]·products[n + p]`.
operation!(BandWeights, |kernel: &'a [T],
                         items: &'a [T],
                         products: &'a [T],
                         weights: &'a mut [T],
                         sums: &'a mut [T]| {
    let lanes = sums.len();
    assert!(lanes.is_multiple_of(V::LANES) && weights.len() >= kernel.len() * lanes);
    assert!(items.len().min(products.len()) + 1 >= lanes + kernel.len());
    for lane in (0..lanes).step_by(V::LANES) {
        // SAFETY: every line has a register at `lane`, and items one for every tap further on, by the assertions above.
        unsafe {
            let mut sum = V::load(sums.as_ptr().add(lane));
            for (p, &factor) in kernel.iter().enumerate() {
                let factor = V::splat(factor);
                let weight = factor.mul(V::load(items.as_ptr().add(lane + p)));
                weight.store(weights.as_mut_ptr().add(p * lanes + lane));
                sum = factor.mul_add(V::load(products.as_ptr().add(lane + p)), sum);
            }
            sum.store(sums.as_mut_ptr().add(lane));
        }
    }
});

/// Output `r` of a block of rows meets as many rows before its own first one.
const MARGIN: usize = BLOCK_ROWS - 1;

/// The sums of rows of a chunk whose weights are all relative to one exponent: windows, what comes before them and what after.
#[derive(Clone, Copy)]
pub(super) struct Convolution<'a, T> {
    /// A line of [`CHUNK`] outputs for each tap.
    pub weights: &'a [T],
    pub taps: usize,
    /// What items weigh outside of windows.
    pub items: &'a [T],
    /// A row for each item, as long as those of the sums.
    pub rows: &'a [T],
    pub row_length: usize,
    pub outputs: usize,
    /// How many items behind the first output's window enter what comes after, if that counts.
    pub after: Option<usize>,
    /// Whether this is added to what stands there; windows alone are.
    pub add: bool,
}

// Writes `to_n = before_n + Σ_p weights_p(n)·row_{n+p} + after_n`. `before` is what comes before the first output's window, and
// then the last one's; `after` what comes after all items, and has room for a row for each block of outputs behind it.
operation!(Convolve, |c: &'a Convolution<'a, T>, before: &'a mut [T], after: &'a mut [T], to: &'a mut [T]| {
    let (width, blocks) = (c.row_length, c.outputs.div_ceil(BLOCK_ROWS));
    let (whole, behind) = (blocks * BLOCK_ROWS, c.taps - 1);
    assert!(width.is_multiple_of(V::LANES) && c.taps > 0 && whole <= CHUNK && to.len() >= whole * width);
    assert!(c.weights.len() >= c.taps * CHUNK && (before.is_empty() || before.len() >= width));
    let alone = before.is_empty() && c.after.is_none();
    assert!(!c.add || alone);
    // As many items are read.
    let items = behind + c.after.unwrap_or(whole).max(whole);
    assert!(c.rows.len() >= items * width && (alone || c.items.len() >= items));
    assert!(c.after.is_none() || after.len() >= (blocks + 1) * width);
    // SAFETY: rows are whole registers, and rows and lines are as many as the assertions say.
    unsafe {
        by_whole_registers!(0, width, V::BLOCK_COLUMNS, N, |column| {
            if let Some(end) = c.after {
                after_blocks::<V, N>(c, end, column, after);
            }
            for block in 0..blocks {
                convolution_tile::<V, N>(c, block, column, before, after, to);
            }
        })
    }
});

/// What comes after the last output of each block, behind the sum of what comes after all.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn after_blocks<V: Vector, const N: usize>(
    c: &Convolution<'_, V::Element>,
    end: usize,
    column: usize,
    after: &mut [V::Element],
) {
    let blocks = c.outputs.div_ceil(BLOCK_ROWS);
    // SAFETY: the caller checked that all these rows are there.
    unsafe {
        let mut sum: [V; N] = std::array::from_fn(|n| V::load(after.as_ptr().add(column + n * V::LANES)));
        let mut item = end;
        for block in (0..blocks).rev() {
            while item > (block + 1) * BLOCK_ROWS {
                item -= 1;
                let at = c.taps - 1 + item;
                let (weight, row) =
                    (V::splat(*c.items.get_unchecked(at)), c.rows.as_ptr().add(at * c.row_length + column));
                for n in 0..N {
                    sum[n] = weight.mul_add(V::load(row.add(n * V::LANES)), sum[n]);
                }
            }
            for n in 0..N {
                sum[n].store(after.as_mut_ptr().add((block + 1) * c.row_length + column + n * V::LANES));
            }
        }
    }
}

/// `BLOCK_ROWS` outputs and `N` registers. No output meets a row that its window does not hold: what stands there may be no
/// number.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn convolution_tile<V: Vector, const N: usize>(
    c: &Convolution<'_, V::Element>,
    block: usize,
    column: usize,
    before: &mut [V::Element],
    after: &[V::Element],
    to: &mut [V::Element],
) {
    let (output, length) = (block * BLOCK_ROWS, c.row_length);
    // SAFETY: the caller checked that all these rows and lines are there.
    unsafe {
        let mut sums = [[V::splat(V::Element::ZERO); N]; BLOCK_ROWS];
        let row = |item: usize| -> [V; N] {
            let row = c.rows.as_ptr().add(item * length + column);
            std::array::from_fn(|n| V::load(row.add(n * V::LANES)))
        };
        let to = to.as_mut_ptr().add(output * length + column);
        if c.add {
            for r in 0..BLOCK_ROWS {
                for n in 0..N {
                    sums[r][n] = V::load(to.add(r * length + n * V::LANES));
                }
            }
        }
        if !before.is_empty() {
            let place = before.as_mut_ptr().add(column);
            let mut sum: [V; N] = std::array::from_fn(|n| V::load(place.add(n * V::LANES)));
            for r in 0..BLOCK_ROWS {
                sums[r] = sum;
                let (weight, row) = (V::splat(*c.items.get_unchecked(output + r)), row(output + r));
                for n in 0..N {
                    sum[n] = weight.mul_add(row[n], sum[n]);
                }
            }
            for n in 0..N {
                sum[n].store(place.add(n * V::LANES));
            }
        }
        if c.after.is_some() {
            let place = after.as_ptr().add((block + 1) * length + column);
            let mut sum: [V; N] = std::array::from_fn(|n| V::load(place.add(n * V::LANES)));
            for r in (0..BLOCK_ROWS).rev() {
                let at = output + r + c.taps - 1;
                let (weight, row) = (V::splat(*c.items.get_unchecked(at)), row(at));
                for n in 0..N {
                    sums[r][n] = sums[r][n].add(sum[n]);
                    sum[n] = weight.mul_add(row[n], sum[n]);
                }
            }
        }
        // Output `r` of the block meets row `j` by tap `j − r`. Which outputs is told by constants, so that sums stay in registers.
        let weights = c.weights.as_ptr().wrapping_add(output);
        macro_rules! meet {
            ($j:expr, |$r:ident| $meets:expr) => {
                let (j, row) = ($j, row(output + $j));
                for $r in 0..BLOCK_ROWS {
                    if $meets {
                        let weight = V::splat(*weights.add((j - $r) * CHUNK + $r));
                        for n in 0..N {
                            sums[$r][n] = weight.mul_add(row[n], sums[$r][n]);
                        }
                    }
                }
            };
        }
        macro_rules! first {
            ($($j:literal)*) => { $( meet!($j, |r| r <= $j && $j < c.taps + r); )* };
        }
        macro_rules! last {
            ($($j:literal)*) => { $( if c.taps + $j >= MARGIN { meet!(c.taps + $j, |r| r > $j); } )* };
        }
        const { assert!(MARGIN == 3, "the lists below") };
        first!(0 1 2);
        for j in MARGIN..c.taps {
            meet!(j, |_r| true);
        }
        last!(0 1 2);
        for r in 0..BLOCK_ROWS {
            for n in 0..N {
                sums[r][n].store(to.add(r * length + n * V::LANES));
            }
        }
    }
}

/// Gradients of the taps of a chunk whose weights are all relative to one exponent.
#[derive(Clone, Copy)]
pub(super) struct TapGradients<'a, T> {
    /// Rows of outputs, one after the other, and what is subtracted from their products; 0 beyond the last output.
    pub outputs: &'a [T],
    pub c: &'a [T],
    pub count: usize,
    /// Weights of items, and their rows.
    pub items: &'a [T],
    pub rows: &'a [T],
    pub width: usize,
    pub kernel: &'a [T],
}

// `to[p] += kernel[p]·Σ_n items[n+p]·(output_n·row_{n+p} − c_n)`; rows times their weights stand in `scaled` meanwhile.
operation!(AddTapGradients, |g: &'a TapGradients<'a, T>, scaled: &'a mut [T], to: &'a mut [T]| {
    /// Taps at once: each has one sum, and so many of them hide the latency of the fused products.
    const TAPS: usize = 12;
    let (taps, lanes) = (g.kernel.len(), g.c.len());
    assert!(g.width.is_multiple_of(V::LANES) && lanes.is_multiple_of(V::LANES) && to.len() >= taps);
    assert!(g.outputs.len() >= g.count * g.width && g.count <= lanes && g.items.len() + 1 >= lanes + taps);
    let reach = (g.count + taps).saturating_sub(1);
    assert!(g.rows.len().min(scaled.len()) >= reach * g.width);
    for (j, &weight) in g.items[..reach].iter().enumerate() {
        for at in (j * g.width..(j + 1) * g.width).step_by(V::LANES) {
            // SAFETY: both blocks have a register there by the assertion above.
            unsafe { V::splat(weight).mul(V::load(g.rows.as_ptr().add(at))).store(scaled.as_mut_ptr().add(at)) };
        }
    }
    let groups = taps.div_ceil(TAPS);
    for group in 0..groups {
        let (first, last) = (group * taps / groups, (group + 1) * taps / groups);
        let mut dots = [T::ZERO; TAPS];
        // SAFETY: outputs and rows are as many as the assertions say.
        unsafe {
            macro_rules! some {
                ($($n:literal)*) => {
                    match last - first {
                        $($n => tap_products::<V, $n>(g, scaled, first, &mut dots),)*
                        _ => tap_products::<V, TAPS>(g, scaled, first, &mut dots),
                    }
                };
            }
            some!(1 2 3 4 5 6 7 8 9 10 11);
        }
        for (p, dot) in (first..last).zip(dots) {
            // SAFETY: as many lanes stand in `c`, and in the items for every tap further on, by the assertions above.
            let less = unsafe {
                let mut less = V::splat(T::ZERO);
                for lane in (0..lanes).step_by(V::LANES) {
                    let c = V::load(g.c.as_ptr().add(lane));
                    less = c.mul_add(V::load(g.items.as_ptr().add(lane + p)), less);
                }
                less.sum()
            };
            to[p] += g.kernel[p] * (dot - less);
        }
    }
});

/// `Σ_n output_n·row_{n+p}` of `P` taps.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn tap_products<V: Vector, const P: usize>(
    g: &TapGradients<'_, V::Element>,
    scaled: &[V::Element],
    first: usize,
    dots: &mut [V::Element],
) {
    // SAFETY: the caller checked that all these rows are there.
    unsafe {
        let mut sums = [V::splat(V::Element::ZERO); P];
        for n in 0..g.count {
            let output = g.outputs.as_ptr().add(n * g.width);
            let row = scaled.as_ptr().add((n + first) * g.width);
            for column in (0..g.width).step_by(V::LANES) {
                let own = V::load(output.add(column));
                for p in 0..P {
                    sums[p] = own.mul_add(V::load(row.add(p * g.width + column)), sums[p]);
                }
            }
        }
        for (to, sum) in dots.iter_mut().zip(sums) {
            *to = sum.sum();
        }
    }
}
