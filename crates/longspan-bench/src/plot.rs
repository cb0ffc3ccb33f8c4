//! Log-log plots: SVG for pages and papers, PNG for everything else.

use std::fmt::Display;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

use crate::error::Error;

/// Drawn at twice the size it is shown at: the drawing library knows whole pixels only.
const SCALE: i32 = 2;
/// Shown size.
const SIZE: (i32, i32) = (900, 520);
/// Around the plotting area: left, top, right, bottom. The legend stands on the right.
const MARGIN: (i32, i32, i32, i32) = (74, 52, 238, 58);

const TEXT: RGBColor = RGBColor(0x22, 0x22, 0x22);
const FAINT: RGBColor = RGBColor(0x6b, 0x6b, 0x6b);
const GRID: RGBColor = RGBColor(0xe6, 0xe6, 0xe6);

/// Okabe and Ito's colours, which people with any colour vision tell apart, without the yellow that white swallows;
/// then three dark ones for when there are more curves. The baseline is black.
const COLOURS: [RGBColor; 9] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x7a, 0x4f, 0x1d),
    RGBColor(0x5b, 0x3a, 0x8c),
    RGBColor(0x8a, 0x8a, 0x8a),
];

/// How a curve looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// Which colour and marker; `None` is the baseline's black.
    pub colour: Option<usize>,
    /// Dashes instead of a full line.
    pub dashed: bool,
    /// Hollow markers.
    pub hollow: bool,
}

impl Look {
    fn rgb(self) -> RGBColor {
        self.colour.map_or(RGBColor(0, 0, 0), |n| COLOURS[n % COLOURS.len()])
    }
}

/// One curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// For the legend.
    pub label: String,
    /// `(length, quantity)`, ascending and positive.
    pub points: Vec<(f64, f64)>,
    /// How it looks.
    pub look: Look,
}

/// A place to mark on a plot, such as a crossing.
#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    /// Tokens.
    pub length: f64,
    /// The quantity there.
    pub height: f64,
    /// The colour of the curve that it belongs to.
    pub look: Look,
}

/// What the vertical axis counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Seconds.
    Time,
    /// Bytes.
    Memory,
}

/// Curves over lengths, both axes logarithmic.
#[derive(Debug, Clone, PartialEq)]
pub struct Plot {
    /// For file names: lower case and hyphens.
    pub name: String,
    /// Above the plot.
    pub title: String,
    /// Below the title: sizes and machine.
    pub subtitle: String,
    /// Of the vertical axis, without its unit.
    pub quantity: &'static str,
    /// Of the vertical axis.
    pub unit: Unit,
    /// The curves; those without points are left out.
    pub lines: Vec<Line>,
    /// Crossings.
    pub marks: Vec<Mark>,
}

/// Makes the font known that measures and draws letters. Once before the first plot; it must have Latin letters and the
/// signs `µ`, `×` and `·`.
///
/// # Errors
/// If the bytes are not an OpenType font.
pub fn use_font(font: &'static [u8]) -> Result<(), Error> {
    register_font("sans-serif", FontStyle::Normal, font)
        .map_err(|_| Error::Plot { plot: "letters".to_owned(), reason: "the font cannot be read".to_owned() })
}

impl Plot {
    /// As SVG, whose letters are text.
    ///
    /// # Errors
    /// If no font was given or the drawing library fails.
    pub fn svg(&self) -> Result<String, Error> {
        let mut svg = String::new();
        self.draw(&SVGBackend::with_string(&mut svg, scaled_size()).into_drawing_area())?;
        // Only seen where a reader's system lacks the first of them.
        Ok(svg.replace("font-family=\"sans-serif\"", "font-family=\"DejaVu Sans, Verdana, sans-serif\""))
    }

    /// As PNG.
    ///
    /// # Errors
    /// As [`svg`](Self::svg).
    pub fn png(&self) -> Result<Vec<u8>, Error> {
        let (width, height) = scaled_size();
        let mut pixels = vec![0; (width * height * 3) as usize];
        self.draw(&BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area())?;
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder
            .write_header()
            .and_then(|mut writer| writer.write_image_data(&pixels))
            .map_err(|error| self.broken(&error))?;
        Ok(file)
    }

    fn broken(&self, error: &dyn Display) -> Error {
        Error::Plot { plot: self.name.clone(), reason: error.to_string() }
    }

    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Result<(), Error> {
        area.fill(&WHITE).map_err(|e| self.broken(&e))?;
        let canvas = Canvas { area, frame: Frame::around(&self.lines) };
        canvas.paint(self).map_err(|e| self.broken(&e))?;
        area.present().map_err(|e| self.broken(&e))
    }
}

fn scaled_size() -> (u32, u32) {
    ((SIZE.0 * SCALE) as u32, (SIZE.1 * SCALE) as u32)
}

/// The rectangle of the plotting area, and which logarithms lie at its sides.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Frame {
    /// Base-2 logarithms of lengths.
    x: (f64, f64),
    /// Base-10 logarithms of quantities.
    y: (f64, f64),
}

impl Frame {
    /// From the first to the last length, and over all quantities with a little air; never empty.
    fn around(lines: &[Line]) -> Self {
        let points = || lines.iter().flat_map(|line| &line.points);
        let range = |logs: &mut dyn Iterator<Item = f64>| {
            logs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)))
        };
        let (left, right) = range(&mut points().map(|p| p.0.log2()));
        let (low, high) = range(&mut points().map(|p| p.1.log10()));
        if left > right {
            return Self { x: (5.0, 13.0), y: (-6.0, 0.0) };
        }
        let air = 0.06 * (high - low).max(1.0);
        Self { x: (left - 0.15, right.max(left + 1.0) + 0.15), y: (low - air, high.max(low + 0.5) + air) }
    }

    fn left() -> i32 {
        MARGIN.0
    }
    fn right() -> i32 {
        SIZE.0 - MARGIN.2
    }
    fn top() -> i32 {
        MARGIN.1
    }
    fn bottom() -> i32 {
        SIZE.1 - MARGIN.3
    }

    /// In drawn pixels.
    fn at(&self, (length, quantity): (f64, f64)) -> (i32, i32) {
        let place = |value: f64, (from, to): (f64, f64), start: i32, end: i32| {
            let share = (value - from) / (to - from);
            ((f64::from(start) + share * f64::from(end - start)) * f64::from(SCALE)).round() as i32
        };
        (
            place(length.log2(), self.x, Self::left(), Self::right()),
            place(quantity.log10(), self.y, Self::bottom(), Self::top()),
        )
    }
}

/// `2ⁿ` as `32`, `1k`, `128k`, `1M`.
fn length_label(exponent: i32) -> String {
    match exponent {
        20.. => format!("{}M", 1u64 << (exponent - 20).min(40)),
        10.. => format!("{}k", 1u64 << (exponent - 10)),
        0.. => (1u64 << exponent).to_string(),
        _ => String::new(),
    }
}

/// `10ⁿ` of a unit.
fn decade_label(exponent: i32, unit: Unit) -> String {
    let (prefixes, names): (i32, [&str; 4]) = match unit {
        Unit::Time => (-9, ["ns", "µs", "ms", "s"]),
        Unit::Memory => (0, ["B", "kB", "MB", "GB"]),
    };
    let step = (exponent - prefixes).div_euclid(3).clamp(0, 3);
    let power = exponent - prefixes - 3 * step;
    let number =
        if power >= 0 { format!("{}", 10u64.pow(power.min(18) as u32)) } else { format!("{}", 10f64.powi(power)) };
    format!("{number} {}", names[step as usize])
}

/// Draws in shown pixels onto an area of drawn ones.
struct Canvas<'a, B: DrawingBackend> {
    area: &'a DrawingArea<B, Shift>,
    frame: Frame,
}

type Drawn<B> = Result<(), DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

impl<B: DrawingBackend> Canvas<'_, B> {
    fn paint(&self, plot: &Plot) -> Drawn<B> {
        self.grid(plot)?;
        let left = Frame::left();
        self.text(&plot.title, (left, 10), 17, TEXT, (HPos::Left, VPos::Top))?;
        self.text(&plot.subtitle, (left, 31), 12, FAINT, (HPos::Left, VPos::Top))?;
        for mark in &plot.marks {
            let (x, y) = self.frame.at((mark.length, mark.height));
            let bottom = Frame::bottom() * SCALE;
            let colour = mark.look.rgb();
            self.dashes(&[(x, y), (x, bottom)], colour, SCALE, (4 * SCALE, 4 * SCALE))?;
        }
        for line in &plot.lines {
            self.curve(line)?;
        }
        self.crossings(plot)?;
        self.legend(plot)
    }

    fn text(
        &self,
        text: &str,
        (x, y): (i32, i32),
        size: i32,
        colour: RGBColor,
        (horizontal, vertical): (HPos, VPos),
    ) -> Drawn<B> {
        let style = ("sans-serif", size * SCALE).into_font().color(&colour).pos(Pos::new(horizontal, vertical));
        // The middle of a line's box is above the middle of its small letters.
        let lower = if matches!(vertical, VPos::Center) { size / 6 } else { 0 };
        self.area.draw_text(text, &style, (x * SCALE, (y + lower) * SCALE))
    }

    fn grid(&self, plot: &Plot) -> Drawn<B> {
        let frame = &self.frame;
        let (left, right, top, bottom) = (Frame::left(), Frame::right(), Frame::top(), Frame::bottom());
        let straight = |from: (i32, i32), to: (i32, i32), colour: RGBColor| {
            self.area.draw(&PathElement::new(vec![from, to], colour.stroke_width(SCALE as u32)))
        };
        let exponents = |(low, high): (f64, f64)| low.ceil() as i32..=high.floor() as i32;
        for exponent in exponents(frame.x) {
            let x = frame.at((2f64.powi(exponent), 1.0)).0;
            straight((x, top * SCALE), (x, bottom * SCALE), GRID)?;
            self.text(&length_label(exponent), (x / SCALE, bottom + 7), 12, TEXT, (HPos::Center, VPos::Top))?;
        }
        let decades = exponents(frame.y).count();
        for exponent in exponents(frame.y) {
            let y = frame.at((1.0, 10f64.powi(exponent))).1;
            straight((left * SCALE, y), (right * SCALE, y), GRID)?;
            let label = decade_label(exponent, plot.unit);
            self.text(&label, (left - 8, y / SCALE), 12, TEXT, (HPos::Right, VPos::Center))?;
        }
        // Where few decades show, a reader needs steps between them.
        if decades <= 3 {
            for exponent in frame.y.0.floor() as i32..=frame.y.1.floor() as i32 {
                for digit in [2, 5] {
                    let value = f64::from(digit) * 10f64.powi(exponent);
                    let y = frame.at((1.0, value)).1;
                    if !(top * SCALE..=bottom * SCALE).contains(&y) {
                        continue;
                    }
                    straight((left * SCALE, y), (right * SCALE, y), GRID)?;
                    let show = match plot.unit {
                        Unit::Time => crate::quantity::time(value),
                        Unit::Memory => crate::quantity::bytes(value),
                    };
                    let label = show.replace(".00", "").replace(".0", "");
                    self.text(&label, (left - 8, y / SCALE), 12, FAINT, (HPos::Right, VPos::Center))?;
                }
            }
        }
        straight((left * SCALE, bottom * SCALE), (right * SCALE, bottom * SCALE), FAINT)?;
        straight((left * SCALE, top * SCALE), (left * SCALE, bottom * SCALE), FAINT)?;
        let middle = (left + right) / 2;
        self.text("sequence length (tokens)", (middle, SIZE.1 - 14), 13, TEXT, (HPos::Center, VPos::Bottom))?;
        let style = ("sans-serif", 13 * SCALE)
            .into_font()
            .transform(FontTransform::Rotate270)
            .color(&TEXT)
            .pos(Pos::new(HPos::Center, VPos::Top));
        self.area.draw_text(plot.quantity, &style, (8 * SCALE, (top + bottom) / 2 * SCALE))
    }

    fn curve(&self, line: &Line) -> Drawn<B> {
        let points: Vec<(i32, i32)> = line.points.iter().map(|&point| self.frame.at(point)).collect();
        self.stroke(&points, line.look)?;
        points.iter().try_for_each(|&point| self.marker(point, line.look))
    }

    fn stroke(&self, points: &[(i32, i32)], look: Look) -> Drawn<B> {
        let width = if look.colour.is_none() { 5 * SCALE / 2 } else { 2 * SCALE };
        if look.dashed {
            return self.dashes(points, look.rgb(), width, (6 * SCALE, 4 * SCALE));
        }
        self.area.draw(&PathElement::new(points.to_vec(), look.rgb().stroke_width(width as u32)))
    }

    /// A path of dashes and gaps that run on around its corners.
    fn dashes(&self, points: &[(i32, i32)], colour: RGBColor, width: i32, (dash, gap): (i32, i32)) -> Drawn<B> {
        let (dash, period) = (f64::from(dash), f64::from(dash + gap));
        let mut walked = 0.0;
        for pair in points.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            let (dx, dy) = (f64::from(to.0 - from.0), f64::from(to.1 - from.1));
            let length = dx.hypot(dy);
            let at = |s: f64| {
                let share = if length > 0.0 { s / length } else { 0.0 };
                ((f64::from(from.0) + share * dx).round() as i32, (f64::from(from.1) + share * dy).round() as i32)
            };
            let mut place = 0.0;
            while place < length {
                let phase = (walked + place) % period;
                let (drawn, end) =
                    if phase < dash { (true, place + dash - phase) } else { (false, place + period - phase) };
                // A rounding error must not stop the walk.
                let end = end.max(place + 0.5).min(length);
                if drawn {
                    let style = colour.stroke_width(width as u32);
                    self.area.draw(&PathElement::new(vec![at(place), at(end)], style))?;
                }
                place = end;
            }
            walked += length;
        }
        Ok(())
    }

    /// Circles, squares, triangles and diamonds in turn, so that colour is not all that tells curves apart.
    fn marker(&self, (x, y): (i32, i32), look: Look) -> Drawn<B> {
        let r = 7 * SCALE / 2;
        let colour = look.rgb();
        let shape = match look.colour {
            None => return self.area.draw(&Circle::new((x, y), r - 1, fill(colour, look.hollow))),
            Some(n) if n % 4 == 0 => {
                self.area.draw(&Circle::new((x, y), r, WHITE.filled()))?;
                return self.area.draw(&Circle::new((x, y), r, fill(colour, look.hollow)));
            }
            Some(n) if n % 4 == 1 => vec![(x - r, y - r), (x + r, y - r), (x + r, y + r), (x - r, y + r)],
            Some(n) if n % 4 == 2 => vec![(x, y - r - 2), (x + r + 1, y + r), (x - r - 1, y + r)],
            Some(_) => vec![(x, y - r - 2), (x + r + 2, y), (x, y + r + 2), (x - r - 2, y)],
        };
        if !look.hollow {
            return self.area.draw(&Polygon::new(shape, colour.filled()));
        }
        self.area.draw(&Polygon::new(shape.clone(), WHITE.filled()))?;
        let mut outline = shape;
        outline.extend_from_within(..1);
        self.area.draw(&PathElement::new(outline, colour.stroke_width(3 * SCALE as u32 / 2)))
    }

    /// Rings around crossings and their lengths, kept apart where crossings are close.
    fn crossings(&self, plot: &Plot) -> Drawn<B> {
        let mut marks: Vec<&Mark> = plot.marks.iter().collect();
        marks.sort_by(|a, b| a.length.total_cmp(&b.length));
        let mut taken: Vec<(i32, i32)> = Vec::new();
        for mark in marks {
            let (x, y) = self.frame.at((mark.length, mark.height));
            let style = TEXT.stroke_width(SCALE as u32);
            self.area.draw(&Circle::new((x, y), 6 * SCALE, style))?;
            let text = crate::quantity::tokens(mark.length.round() as usize);
            let mut level = 0;
            while taken.contains(&(level, x / (46 * SCALE))) || taken.contains(&(level, x / (46 * SCALE) - 1)) {
                level += 1;
            }
            taken.push((level, x / (46 * SCALE)));
            let place = (x / SCALE + 4, Frame::bottom() - 6 - 15 * level);
            self.text(&text, place, 12, mark.look.rgb(), (HPos::Left, VPos::Bottom))?;
        }
        Ok(())
    }

    /// In the order of the curves' right ends, so that the eye finds them.
    fn legend(&self, plot: &Plot) -> Drawn<B> {
        let mut lines: Vec<&Line> = plot.lines.iter().filter(|line| !line.points.is_empty()).collect();
        let end = |line: &Line| line.points.last().map_or(0.0, |point| point.1);
        lines.sort_by(|a, b| end(b).total_cmp(&end(a)));
        let x = Frame::right() + 16;
        for (n, line) in lines.iter().enumerate() {
            let y = Frame::top() + 12 + 22 * n as i32;
            let at = |x: i32| (x * SCALE, y * SCALE);
            self.stroke(&[at(x), at(x + 28)], line.look)?;
            self.marker(at(x + 14), line.look)?;
            self.text(&line.label, (x + 36, y), 12, TEXT, (HPos::Left, VPos::Center))?;
        }
        if !plot.marks.is_empty() {
            let y = Frame::top() + 12 + 22 * lines.len() as i32 + 8;
            self.area.draw(&Circle::new(((x + 14) * SCALE, y * SCALE), 6 * SCALE, TEXT.stroke_width(SCALE as u32)))?;
            self.text("faster from here on", (x + 36, y), 12, FAINT, (HPos::Left, VPos::Center))?;
        }
        Ok(())
    }
}

fn fill(colour: RGBColor, hollow: bool) -> ShapeStyle {
    if hollow { colour.stroke_width(3 * SCALE as u32 / 2) } else { colour.filled() }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The command's own font; in the workspace only.
    pub(crate) const FONT: &[u8] = include_bytes!("../../longspan-cli/assets/DejaVuSans-latin.ttf");

    fn line(label: &str, colour: Option<usize>, points: &[(f64, f64)]) -> Line {
        Line {
            label: label.into(),
            points: points.to_vec(),
            look: Look { colour, dashed: colour == Some(1), hollow: colour == Some(2) },
        }
    }

    fn plot() -> Plot {
        Plot {
            name: "example".into(),
            title: "An example".into(),
            subtitle: "of nothing".into(),
            quantity: "time per call",
            unit: Unit::Time,
            lines: vec![
                line("a quadratic one", None, &[(32.0, 1e-6), (1024.0, 1e-3)]),
                line("a dashed one", Some(1), &[(32.0, 3e-6), (1024.0, 1e-4)]),
                line("a hollow one", Some(2), &[(32.0, 4e-6), (1024.0, 2e-4)]),
                line("one without points", Some(3), &[]),
            ],
            marks: vec![Mark {
                length: 90.0,
                height: 8e-6,
                look: Look { colour: Some(1), dashed: false, hollow: false },
            }],
        }
    }

    #[test]
    fn a_plot_has_axes_a_legend_and_marks() {
        use_font(FONT).unwrap();
        let svg = plot().svg().unwrap();
        for part in [
            "An example",
            "of nothing",
            "time per call",
            "sequence length (tokens)",
            "a dashed one",
            "100 µs",
            "1k",
            ">\n90\n",
        ] {
            assert!(svg.contains(part), "{part}\n{svg}");
        }
        assert!(!svg.contains("one without points") && !svg.contains("NaN"));
        let png = plot().png().unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(&png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        for colour in [COLOURS[1], COLOURS[2], TEXT] {
            assert!(pixels.chunks(3).any(|p| p == [colour.0, colour.1, colour.2]), "{colour:?}");
        }
    }

    #[test]
    fn nothing_and_one_point_are_drawn_too() {
        use_font(FONT).unwrap();
        for lines in [vec![], vec![line("a", Some(0), &[(64.0, 1.0)])]] {
            let plot = Plot { lines, marks: Vec::new(), ..plot() };
            assert!(plot.svg().unwrap().contains("</svg>"));
            plot.png().unwrap();
        }
    }

    #[test]
    fn ticks_read_well() {
        assert_eq!([5, 10, 17, 20].map(length_label), ["32", "1k", "128k", "1M"]);
        assert_eq!(
            [-9, -6, -4, -1, 0, 2].map(|n| decade_label(n, Unit::Time)),
            ["1 ns", "1 µs", "100 µs", "100 ms", "1 s", "100 s"]
        );
        assert_eq!([0, 4, 6, 10].map(|n| decade_label(n, Unit::Memory)), ["1 B", "10 kB", "1 MB", "10 GB"]);
    }
}
