"""ConvNet against the paper's table, counted by hand."""

import torch
from torch import nn

from adanpc.lab.networks.convnet import ConvNet

# 3x3 weights and a bias for each output channel, then scale and shift of the normalization:
# 64(9·1 + 1) + 128 = 768; 128(9·64 + 1) + 256 = 74,112; 128(9·128 + 1) + 256 = 147,840, twice.
PARAMETERS = 768 + 74_112 + 2 * 147_840


def test_layers_are_those_of_the_table() -> None:
    kinds = [type(layer) for layer in ConvNet().layers]
    assert kinds == [nn.Conv2d, nn.ReLU, nn.GroupNorm] * 4 + [nn.AdaptiveAvgPool2d, nn.Flatten]
    convolutions = [layer for layer in ConvNet().layers if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.stride) for c in convolutions] == [
        (1, 64, (1, 1)), (64, 128, (2, 2)), (128, 128, (1, 1)), (128, 128, (1, 1)),
    ]  # fmt: skip
    assert all(c.kernel_size == (3, 3) for c in convolutions)
    assert all(layer.num_groups == 8 for layer in ConvNet().layers if isinstance(layer, nn.GroupNorm))


def test_parameters_are_as_many_as_the_table_says() -> None:
    assert sum(parameter.numel() for parameter in ConvNet().parameters()) == PARAMETERS == 370_560


def test_color_images_only_change_the_first_layer() -> None:
    assert sum(parameter.numel() for parameter in ConvNet(channels=3).parameters()) == PARAMETERS + 2 * 64 * 9
    assert ConvNet(channels=3)(torch.rand(2, 3, 28, 28)).shape == (2, 128)


def test_features_and_padding() -> None:
    net = ConvNet()
    assert net(torch.rand(5, 1, 28, 28)).shape == (5, ConvNet.features) == (5, 128)
    sizes = [net.layers[: 3 * block](torch.rand(1, 1, 28, 28)).shape[2:] for block in (1, 2, 3, 4)]
    assert sizes == [(28, 28), (14, 14), (14, 14), (14, 14)]


def test_features_are_the_average_over_the_image() -> None:
    net, images = ConvNet(), torch.rand(3, 1, 28, 28)
    maps = net.layers[:-2](images)
    assert torch.allclose(net(images), maps.mean(dim=(2, 3)), atol=1e-6)


def test_an_image_is_encoded_alone() -> None:
    net, images = ConvNet(), torch.rand(4, 1, 28, 28)
    assert torch.allclose(net(images)[2], net(images[2:3])[0], atol=1e-5)
