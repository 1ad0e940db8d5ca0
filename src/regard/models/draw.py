"""DRAW: a variational autoencoder that reads and paints an image glimpse by glimpse
(Gregor et al. 2015, arXiv 1502.04623)."""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.cells.draw import DrawFilters, FilterBank, Reader, Writer
from regard.models.config import DRAWConfig
from regard.models.model import Model

MAX_LOG_SIGMA = 10.0  # bound of the logarithm of a standard deviation: exp(20) is still finite


class DRAWOutput(NamedTuple):
    """Output of a DRAW model.

    Attributes:
        logits: Logits of the pixels, (b, c, height, width): the last canvas.
        kl: KL divergence of the latent vectors from their prior in nats, (b): L_z of the paper.
    """

    logits: Tensor
    kl: Tensor


class Painting(NamedTuple):
    """How images were painted.

    Attributes:
        canvases: Logits of the pixels after each step, (T, b, c, height, width).
        windows: Where each step wrote, (T, b, 5): the rows of the first and last filter, their
            columns, and the standard deviation of the filters, in pixels. None without attention.
    """

    canvases: Tensor
    windows: Tensor | None


class DRAW(Model):
    """Recurrent encoder and decoder with attention for reading and writing:

        x̂_t = x − σ(c_{t−1})                      error image
        r_t = read(x, x̂_t, h^dec_{t−1})
        h^enc_t = LSTM(h^enc_{t−1}, [r_t, h^dec_{t−1}])
        z_t ~ Q(z | h^enc_t) = N(μ_t, σ_t²)
        h^dec_t = LSTM(h^dec_{t−1}, z_t)
        c_t = c_{t−1} + write(h^dec_t)            canvas, logits of the pixels

    In training, z is drawn with torch's global generator, as dropout is; in evaluation mode from
    the seed and the image, so that results repeat.

    Args:
        shape: Channels, height and width of the images.
        dim: Width of the recurrent states.
        config: Numbers of steps and of latent values, and sizes of the patches.
        seed: Seed of the latent vectors in evaluation mode.
    """

    def __init__(
        self, shape: tuple[int, int, int], dim: int, config: DRAWConfig, *, seed: int = 0
    ) -> None:
        super().__init__()
        channels, height, width = shape
        self.shape, self.dim, self.seed = shape, dim, seed
        self.glimpses, self.latent = config.glimpses, config.latent
        pixels = channels * height * width
        read, write = config.read_size, config.write_size
        self.reader = None if read is None else Reader(dim, read)
        self.writer = None if write is None else Writer(dim, write, channels=channels)
        self.write_all = nn.Linear(dim, pixels) if write is None else None
        glimpse = 2 * (pixels if read is None else channels * read * read)
        self.encoder = nn.LSTMCell(glimpse + dim, dim)
        self.posterior = nn.Linear(dim, 2 * config.latent)
        self.decoder = nn.LSTMCell(config.latent, dim)
        self.first_canvas = nn.Parameter(torch.zeros(shape))
        if self.reader is not None:
            init_filters(self.reader.bank, max(height, width))
        if self.writer is not None:
            init_filters(self.writer.bank, max(height, width), writes=True)

    def forward(self, x: Tensor, mask: None = None) -> DRAWOutput:
        """Encode and decode images.

        Args:
            x: Intensities from 0 to 1, or bits, (b, c, height, width).
            mask: None, as images have no padding.
        """
        if mask is not None:
            raise ValueError("images have no padding: mask must be None")
        self._check_images(x)
        noise = self._draw_noise(x)
        canvas = self.first_canvas.to(x.dtype).expand_as(x)
        encoder = decoder = self._first_state(x)
        kl = torch.zeros_like(x[:, 0, 0, 0], dtype=torch.float32)
        for step in range(self.glimpses):
            error = x - canvas.sigmoid()
            seen = torch.cat((x, error), 1)
            glimpse = seen if self.reader is None else self.reader(seen, decoder[0])[0]
            encoder = self.encoder(torch.cat((glimpse.flatten(1), decoder[0]), 1), encoder)
            mean, log_sigma = self.posterior(encoder[0]).float().chunk(2, -1)
            log_sigma = log_sigma.clamp(-MAX_LOG_SIGMA, MAX_LOG_SIGMA)
            kl = kl + (mean.square() + (2 * log_sigma).exp() - 2 * log_sigma - 1).sum(-1) / 2
            z = mean + log_sigma.exp() * noise[step]
            decoder = self.decoder(z.to(x.dtype), decoder)
            canvas = canvas + self._write(decoder[0])[0]
        return DRAWOutput(canvas, kl)

    @torch.no_grad()
    def paint(self, count: int, generator: torch.Generator) -> Painting:
        """Paint images from latent vectors z ~ N(0, 1).

        Args:
            count: Number of images.
            generator: Source of the latent vectors, on the CPU.
        """
        like = self.first_canvas
        noise = torch.randn(self.glimpses, count, self.latent, generator=generator).to(like)
        canvas = like.expand(count, *self.shape)
        decoder = self._first_state(canvas)
        canvases, windows = [], []
        for z in noise:
            decoder = self.decoder(z, decoder)
            change, filters = self._write(decoder[0])
            canvas = canvas + change
            canvases.append(canvas)
            if filters is not None:
                windows.append(describe_window(filters))
        return Painting(torch.stack(canvases), torch.stack(windows) if windows else None)

    def _write(self, state: Tensor) -> tuple[Tensor, DrawFilters | None]:
        """What a decoder state adds to the canvas (b, c, height, width), and where."""
        if self.writer is not None:
            return self.writer(state, *self.shape[1:])
        assert self.write_all is not None
        return self.write_all(state).unflatten(-1, self.shape), None

    def _first_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        zeros = x.new_zeros(len(x), self.dim)
        return zeros, zeros

    def _draw_noise(self, x: Tensor) -> Tensor:
        """Standard normal numbers (T, b, latent). In evaluation mode they follow from the seed and
        the image, so that an image has the same bound in any batch."""
        if self.training:
            return torch.randn(self.glimpses, len(x), self.latent, device=x.device)
        noise = torch.empty(len(x), self.glimpses, self.latent)
        generator = torch.Generator()
        for row, image in zip(noise, x.detach().float().cpu().numpy(), strict=True):
            generator.manual_seed(zlib.crc32(image.tobytes(), self.seed & 0xFFFFFFFF))
            row.normal_(generator=generator)
        return noise.transpose(0, 1).to(x.device)

    def _check_images(self, x: Tensor) -> None:
        if x.dim() != 4 or x.shape[1:] != self.shape or not x.is_floating_point():
            raise ValueError(
                f"images must be floating-point, of shape (b, {', '.join(map(str, self.shape))}), "
                f"not {tuple(x.shape)} {x.dtype}"
            )


def nats_per_image(output: DRAWOutput, x: Tensor) -> Tensor:
    """The variational bound on −log p(x) in nats, (b): L_x + L_z of the paper."""
    logits = output.logits.float()
    reconstruction = F.binary_cross_entropy_with_logits(logits, x.float(), reduction="none")
    return reconstruction.flatten(1).sum(1) + output.kl


@torch.no_grad()
def init_filters(bank: FilterBank, size: int, *, writes: bool = False) -> None:
    """Let the filters cover the image at first, with a standard deviation of a quarter of their
    distance δ; those of a writer with γ = 1 / 2δ².

    The paper does not say how they start. With γ = 1, what is written is spread over so many pixels
    that hundreds of training steps pass before the model paints anything.
    """
    stride = (size - 1) / (bank.patch - 1) if bank.patch > 1 else float(size)
    bank.place.bias.zero_()
    bank.place.bias[2] = 2 * math.log(stride / 4)  # x, y, log σ², log δ̃, log γ
    if writes:
        bank.place.bias[4] = -math.log(2 * stride**2)


def describe_window(filters: DrawFilters) -> Tensor:
    """First and last row, first and last column, and standard deviation of filters, (b, 5), in
    pixels from 0."""
    places = []
    for axis in (filters.rows, filters.columns):
        pixel = torch.arange(axis.shape[-1], device=axis.device, dtype=axis.dtype)
        mean = (axis * pixel).sum(-1)
        places += [mean[:, 0], mean[:, -1]]
    pixel = torch.arange(filters.rows.shape[-1], device=pixel.device, dtype=pixel.dtype)
    spread = (filters.rows * (pixel - (filters.rows * pixel).sum(-1, keepdim=True)).square()).sum(
        -1
    )
    return torch.stack((*places, spread.mean(-1).sqrt()), -1)
